"""Asking tasks that answer late, as live ones on a busy host do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from helpers.snapshots import W0, healthy
from lockstep.cli.main import main
from lockstep.diagnose.collect import collect
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.timing import WHY_ASK_SECONDS
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.monitor_service import add_monitor_service, snapshot_handler
from lockstep.transports.control.server import ControlServer


@contextmanager
def late_task(seconds: float, monitor_seconds: float = 0.0) -> Iterator[str]:
    """The address of a monitor whose task, and which itself, takes this long to answer."""
    left = threading.Event()
    cluster = healthy()

    def answer() -> bytes:
        left.wait(seconds)
        return json.dumps(cluster.task(W0)).encode()

    def describe() -> Description:
        left.wait(monitor_seconds)
        return found

    changed = Broadcast()
    task, monitor = (ControlServer("127.0.0.1", 0, threads=8) for _ in range(2))
    task.add_handlers("Task", {"Snapshot": snapshot_handler(answer)})
    task.start()
    found = Description(str(W0), "host", 1, 2, 3, "training", 0.5, task.address, False, 0, "0.1", 0)
    snapshot = json.dumps(cluster.monitor(W0) | {"description": asdict(found)}).encode()
    add_monitor_service(monitor, describe, changed, lambda: snapshot, max_watchers=1)
    monitor.start()
    try:
        yield monitor.address
    finally:
        left.set()
        changed.close()
        monitor.stop(0)
        task.stop(0)


def test_a_live_task_that_answers_late_is_waited_for() -> None:
    with late_task(0.7) as address:
        (seen,) = collect({str(W0): address}, WHY_ASK_SECONDS, together=True).values()
    assert seen.view is not None, seen.silence
    assert seen.view.task == str(W0)


def test_why_asks_a_late_task_again_before_it_says_that_it_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with late_task(2.0) as address:
        assert main(["why", address, "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["task"], task["answers"]) == (str(W0), True)


def test_all_questions_to_one_address_share_their_time() -> None:
    """A monitor that takes most of it leaves too little for its task, which would answer in time by itself."""
    with late_task(0.5, monitor_seconds=0.7) as address:
        (seen,) = collect({str(W0): address}, 0.8, together=True).values()
        assert seen.view is None
        (seen,) = collect({str(W0): address}, 5.0).values()
        assert seen.view is not None, seen.silence
