"""A healthy run gives no alarm, however rough it is, and however busy its machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.programs import Program
from helpers.waiting import wait_until
from lockstep.diagnose.collect import look_at
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.processes import become_subreaper, dies_with_this_process
from lockstep.runtime.watch.reporting import EVENTS

pytestmark = [pytest.mark.timed, pytest.mark.alone, pytest.mark.drill]

SHAPE = ClusterShape(1, 2)
ROUGH_STEPS, BUSY_STEPS = 2000, 2500
STOPS = 6
BUSY_LOOPS = 4
SECONDS = 240.0


@pytest.mark.timeout(SECONDS + 60)
def test_2000_rough_steps_give_no_verdict_and_no_stall(tmp_path: Path) -> None:
    """Random slow steps of up to 1.5 s, checkpoints, a late worker, and now and then a task is stopped for a second."""
    chance = random.Random(5)
    stops = sorted(chance.randrange(50, ROUGH_STEPS - 50) for _ in range(STOPS))

    def stop_some(cluster: DrillCluster, deadline: float) -> None:
        for step in stops:
            wait_until(lambda step=step: _step(cluster) >= step, deadline - time.monotonic(), f"step {step}")  # type: ignore[misc]
            _stop_for_a_second(cluster.task_pid(chance.choice([server(0), worker(0), worker(1)])))

    assert alarms(tmp_path, stop_some, steps=ROUGH_STEPS, rough=True, late=5.0) == []


@pytest.mark.timeout(SECONDS + 60)
def test_2500_steps_beside_busy_loops_give_no_verdict_and_no_stall(tmp_path: Path) -> None:
    with busy_loops():
        assert alarms(tmp_path, lambda _cluster, _deadline: None, steps=BUSY_STEPS) == []


def alarms(
    folder: Path,
    meanwhile: Callable[[DrillCluster, float], None],
    *,
    steps: int,
    rough: bool = False,
    late: float = 0.0,
) -> list[object]:
    """Everything but notices that a run reports, from its start to its good end."""
    become_subreaper()
    with DrillCluster(SHAPE, folder) as cluster:
        for task in SHAPE.tasks():
            delay = late if task == worker(1) else 0.0
            cluster.start(cluster.plan(task, steps=steps, step_seconds=0.01, rough=rough, delay=delay))
        deadline = time.monotonic() + SECONDS
        meanwhile(cluster, deadline)
        ended = lambda: None not in cluster.exit_codes()  # noqa: E731
        wait_until(ended, deadline - time.monotonic(), "the end of the run")
        assert cluster.exit_codes() == [0, 0, 0]
    events = [json.loads(line) for line in _lines(folder)]
    return [event for event in events if event["kind"] != ReportKind.NOTICE]


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    """As many of them as make the cluster wait for a processor most of the time."""
    loop = dies_with_this_process([sys.executable, "-c", "while True: pass"])
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(Program(loop)) for _ in range(BUSY_LOOPS)]
        yield
        assert all(program.running() for program in loops), "the machine was not busy to the end"


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
