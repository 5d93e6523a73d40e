"""What a benchmark task reports about its time and memory: a file in ``--timing_dir``, lines with ``--verbose``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.private_files import replace_file
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.task.node import Node
from lockstep.runtime.trace.step_times import Moments, computing_and_waiting, server_moments, worker_moments

if TYPE_CHECKING:
    from lockstep.benchmark.training.loop import BenchResult
    from lockstep.runtime.task.server_node import ServerNode
    from lockstep.runtime.task.worker_node import WorkerNode
    from lockstep.training.worker.replica import Replica


def file_name(task: TaskId) -> str:
    """``worker-0.json``, ``ps-1.json``."""
    return f"{task.role.value}-{task.index}.json"


def worker_times(node: WorkerNode, result: BenchResult, replica: Replica, first: int) -> dict[str, Any]:
    """What a worker knows about its steps from ``first`` on."""
    return {
        "task": str(node.task),
        "images_per_sec": result.images_per_sec,
        "seconds_a_step": result.average_wall_time,
        "moments": _from(worker_moments(node.journal, node.blocked()), first),
        "copies": dataclasses.asdict(replica.copies),
        "memory": {"parameters": node.plan.arena_bytes if node.plan else 0, "held": node.memory()},
        "gpu_idle": replica.gpu_idle(),
        "links": _links(node),
    }


def server_times(node: ServerNode, first: int) -> dict[str, Any]:
    """What a server knows about its steps from ``first`` on."""
    return {
        "task": str(node.task),
        "moments": _from(server_moments(node.journal), first),
        "store": dataclasses.asdict(node.store_times),
        "memory": {"parameters": _shard_bytes(node), "held": node.memory()},
        "links": _links(node),
    }


def lines(node: WorkerNode, replica: Replica, first: int) -> list[str]:
    """The same for people."""
    known = {step: at for step, at in worker_moments(node.journal, node.blocked()).items() if step >= first}
    computing, waiting = computing_and_waiting(known)
    links = ", ".join(
        f"{link['peer']} by {link['path']}: {link['sent'] / 1e6:.1f} MB sent, {link['received'] / 1e6:.1f} MB received"
        for link in _links(node)
    )
    told = f"a step of {node.task.short}: computing {1000 * computing:.2f} ms, waiting {1000 * waiting:.2f} ms"
    idle = replica.gpu_idle()
    if idle is not None:
        # Its thread finishes a step long before the GPU does: only the GPU knows how long it waited.
        told += f" (its thread); its GPU waited {1000 * idle:.2f} ms for parameters"
    held = memory_line(node.task, node.plan.arena_bytes if node.plan else 0, node.memory() | replica.memory())
    return [told, replica.copies.sentence(), held, f"links of {node.task.short}: {links}"]


def server_line(node: ServerNode) -> str:
    """What a server holds, for people."""
    return memory_line(node.task, _shard_bytes(node), node.memory())


def memory_line(task: TaskId, parameters: int, held: Mapping[str, int]) -> str:
    """The memory of a task as a multiple of its parameters, without the model's activations."""
    each = ", ".join(f"{name} {nbytes / max(parameters, 1):.2f}" for name, nbytes in held.items() if nbytes)
    total = sum(held.values()) / max(parameters, 1)
    return f"memory of {task.short}: {total:.2f} times its {parameters / 1e6:.1f} MB of parameters ({each})"


def _shard_bytes(node: ServerNode) -> int:
    return node.known_plan.shard_bytes(node.task.index) if node.known_plan is not None else 0


def write_times(folder: str, task: TaskId, times: dict[str, Any]) -> None:
    """Write the file of one task; the folder is created if it does not exist."""
    replace_file(Path(folder) / file_name(task), json.dumps(times).encode())


def read_moments(times: dict[str, Any]) -> Moments:
    """The moments of a file that ``write_times`` wrote."""
    return {int(step): (first, second) for step, (first, second) in times["moments"].items()}


def _from(moments: Moments, first: int) -> dict[str, tuple[float, float]]:
    return {str(step): both for step, both in moments.items() if step >= first}


def _links(node: Node) -> list[dict[str, Any]]:
    found = []
    for peer, reaper in node.peers.items():
        connection = reaper.connection
        if connection is None or connection.endpoint is None:
            continue
        counters = connection.endpoint.counters()
        found.append(
            {
                "peer": str(peer),
                "path": connection.endpoint.path(),
                "sent": counters.bytes_sent,
                "received": counters.bytes_received,
            }
        )
    return found
