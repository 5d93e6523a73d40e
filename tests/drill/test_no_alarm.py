"""A healthy run gives no alarm, however rough it is."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from lockstep.diagnose.collect import look_at
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.ids import ClusterShape, server, worker
from lockstep.runtime.notices import EVENTS
from lockstep.runtime.processes import become_subreaper

pytestmark = [pytest.mark.timed, pytest.mark.alone]

STEPS = 2000
STOPS = 6
SECONDS = 900.0


@pytest.mark.drill
@pytest.mark.timeout(SECONDS + 60)
def test_2000_rough_steps_give_no_verdict_and_no_stall(tmp_path: Path) -> None:
    """Random slow steps of up to 1.5 s, checkpoints, a late worker, and now and then a task is stopped for a second."""
    become_subreaper()
    shape = ClusterShape(1, 2)
    chance = random.Random(5)
    with DrillCluster(shape, tmp_path) as cluster:
        for task in shape.tasks():
            delay = 5.0 if task == worker(1) else 0.0
            cluster.start(cluster.plan(task, steps=STEPS, step_seconds=0.01, rough=True, delay=delay))
        deadline = time.monotonic() + SECONDS
        stops = sorted(chance.randrange(50, STEPS - 50) for _ in range(STOPS))
        for step in stops:
            wait_until(lambda step=step: _step(cluster) >= step, deadline - time.monotonic(), f"step {step}")  # type: ignore[misc]
            _stop_for_a_second(cluster.task_pid(chance.choice([server(0), worker(0), worker(1)])))
        ended = lambda: None not in cluster.exit_codes()  # noqa: E731
        wait_until(ended, deadline - time.monotonic(), "the end of the run")
        assert cluster.exit_codes() == [0, 0, 0]
    events = [json.loads(line) for line in _lines(tmp_path)]
    assert [event for event in events if event["kind"] != "notice"] == []


def _step(cluster: DrillCluster) -> int:
    view = look_at(str(worker(0)), cluster.address(worker(0)), 2.0).view
    return -1 if view is None else view.step


def _stop_for_a_second(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        wait_until(lambda: time.monotonic() - began >= 1.0, 5.0, "a second")
    finally:
        os.kill(pid, signal.SIGCONT)


def _lines(folder: Path) -> list[str]:
    file = folder / EVENTS
    return file.read_text().splitlines() if file.exists() else []
