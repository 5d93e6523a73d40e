"""Without synchronisation no worker waits for another, over shared memory either."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from cluster.tasks import Tasks
from helpers.waiting import wait_until
from lockstep.diagnose.collect import look_at
from lockstep.protocol.core.ids import ClusterShape, TaskId, worker

pytestmark = [pytest.mark.timed, pytest.mark.slow]

STOPS = 12
STEPS = 10
"""A held worker does one or two, with the values that are already on their way."""
FLAGS = (
    *("--nocross_replica_sync", "--server_protocol=grpc+shm", "--num_batches=1000000", "--num_warmup_batches=0"),
    # Much to send and little to compute: most stops strike while a value is on its way.
    *("--device=cpu", "--model=trivial", "--batch_size=1", "--num_threads=1"),
)


def _step(tasks: Tasks, task: TaskId) -> int:
    view = look_at(str(task), tasks.addresses[task], 2.0).view
    return -1 if view is None else view.step


def _advances(tasks: Tasks, task: TaskId, steps: int, seconds: float, what: str) -> None:
    target = max(0, _step(tasks, task)) + steps
    wait_until(lambda: _step(tasks, task) >= target, seconds, what)


@pytest.mark.timeout(120)
def test_a_worker_that_is_stopped_twelve_times_never_holds_the_other() -> None:
    """Over shared memory the receiver copies, so a value on its way to a stopped worker keeps its slot of the server's
    store until that worker wakes up; with two slots, every second update of the others waited for it."""
    tasks = Tasks(ClusterShape(1, 2), FLAGS)
    with contextlib.ExitStack() as closing:
        for task in tasks.shape.tasks():
            closing.enter_context(tasks.start(task))
        pid = wait_until(lambda: tasks.task_pid(worker(1)), 30, "worker 1 runs")
        for stop in range(STOPS):
            _advances(tasks, worker(1), 3, 40, "worker 1 trains")
            os.kill(pid, signal.SIGSTOP)
            try:
                _advances(tasks, worker(0), STEPS, 5, f"worker 0 goes on during stop {stop + 1}")
            finally:
                os.kill(pid, signal.SIGCONT)
