"""What others may ask a task: its snapshot, its metrics, and what it knows of another task that they miss."""

from __future__ import annotations

import json
import time

from lockstep.diagnose.witness import make_statement
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.timing import HEARD_SECONDS
from lockstep.runtime.watch.metrics import MeasuredNode, metrics_json
from lockstep.runtime.watch.snapshot import Shown, snapshot_of
from lockstep.transports.control.monitor_service import snapshot_handler, witness_handler
from lockstep.transports.control.server import ControlServer


def answer_about(node: MeasuredNode, server: ControlServer) -> None:
    """Answer on this server; each answer is made on a thread of gRPC."""
    answers = {"Snapshot": lambda: _snapshot_json(node), "Metrics": lambda: metrics_json(node)}
    server.add_handlers("Task", {name: snapshot_handler(made) for name, made in answers.items()})
    server.add_handlers("Task", {"Witness": witness_handler(lambda name: _statement_about(node, name))})


def _snapshot_json(node: Shown) -> bytes:
    return json.dumps(snapshot_of(node)).encode()


def _statement_about(node: Shown, name: str) -> bytes:
    """JSON of what this task knows of another one of the cluster."""
    address = dict(node.cluster.all_addresses()).get(name)
    if address is None:
        return b"{}"
    keeper = node.peers.get(TaskId.parse(name))
    heard = keeper is not None and keeper.linked and keeper.seconds_unheard(time.monotonic()) < HEARD_SECONDS
    return make_statement(address, heard=heard)
