"""Every listening socket of a running job says whom it refuses, to people, in the events of the run and to ``why``."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from helpers.keys import another_key, no_key
from helpers.programs import run_lockstep
from helpers.refused_callers import call, not_tls, without_certificate
from helpers.waiting import wait_until
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.listening import listening_sockets
from lockstep.runtime.processes import descendants
from lockstep.runtime.watch.reporting import EVENTS
from lockstep.security.refusals import Entrance
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_snapshot

pytestmark = [pytest.mark.timed, pytest.mark.timeout(60)]
SHAPE = ClusterShape(1, 1)
START_SECONDS = 30.0
SAY_SECONDS = 10.0


def test_every_listening_socket_of_a_job_says_whom_it_refuses(tmp_path: Path) -> None:
    with DrillCluster(SHAPE, tmp_path / "run") as cluster:
        for task in SHAPE.tasks():
            cluster.start(cluster.plan(task, steps=100_000))
        wait_until(lambda: _trains(cluster), START_SECONDS, "the job trains")
        assert "lockstep: refused" not in _said(cluster)
        pids = [process.pid for process in descendants(os.getpid())]
        ports, doors = [str(one) for one in listening_sockets(pids)], _doors(pids)
        assert len(ports) >= 2 * len(SHAPE.tasks())
        assert len(doors) == len(SHAPE.tasks())
        for place, stranger in zip(ports, cycle(_strangers(tmp_path)), strict=False):
            stranger(place)
            with no_key():
                call(place)  # the port for tensors has no TLS: there, this is a stream without a proof
        for door in doors:
            _knock(door)
        us = f"user {os.getuid()} (process {os.getpid()})"
        wait_until(lambda: all(f"({place})" in _said(cluster) for place in ports), SAY_SECONDS, "ports say it")
        wait_until(lambda: _said(cluster).count(f"{Entrance.DOOR}: {us}: ") == len(doors), SAY_SECONDS, "doors say it")
        wait_until(lambda: len(_events(tmp_path)) >= len(ports), SAY_SECONDS, "the events")
        _check_events(tmp_path)
        why = run_lockstep("why", cluster.address(server(0)), timeout=30).stdout
        assert set(cluster.exit_codes()) == {None}
    assert "refused callers" in why
    assert why.count("the last from") >= 2 * len(SHAPE.tasks())


def _trains(cluster: DrillCluster) -> bool:
    try:
        address = describe(cluster.address(worker(0)), 1.0).task_address
        snapshot = fetch_snapshot(address, "Task", 1.0).decode() if address else ""
    except Unreachable:
        return False
    return int(snapshot.partition('"step": ')[2].partition(",")[0] or -1) > 3


def _strangers(folder: Path) -> list[Callable[[str], None]]:
    def with_another_key(place: str) -> None:
        with another_key(folder):
            call(place)

    return [
        lambda place: without_certificate(place, "127.0.0.81"),
        with_another_key,
        lambda place: not_tls(place, "127.0.0.82"),
    ]


def _knock(door: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
        knocking.settimeout(SAY_SECONDS)
        knocking.connect(door)
        knocking.send(b"who is there?")
        knocking.recv(1024)


def _doors(pids: list[int]) -> list[bytes]:
    """The listening sockets of these processes that have a name of our own."""
    listening = {
        fields[6]: fields[7].encode().replace(b"@", b"\0", 1)
        for fields in map(str.split, Path("/proc/net/unix").read_text().splitlines())
        if len(fields) == 8 and fields[7].startswith("@lockstep-") and fields[3] == "00010000"
    }
    held = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    return [name for inode, name in listening.items() if f"socket:[{inode}]" in held]


def _said(cluster: DrillCluster) -> str:
    return "".join(log.read_text() for log in (cluster.folder / "logs").iterdir())


def _events(folder: Path) -> list[dict[str, object]]:
    file = folder / "run" / EVENTS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _check_events(folder: Path) -> None:
    events = _events(folder)
    assert {event["kind"] for event in events} == {ReportKind.REFUSED}
    of_tasks = {Entrance.TASK, Entrance.TENSORS, Entrance.DOOR}
    assert {event["entrance"] for event in events} == of_tasks
    assert all(event["callers"] and event["refusal"] and event["caller"] for event in events)
