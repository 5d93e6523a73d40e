"""Tasks may be started in any order: each one listens, and the next is started then.

The original needed the highest index first.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cluster.tasks import tasks_of
from helpers.marks import others_long
from helpers.waiting import wait_until
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker

SHAPE = ClusterShape(2, 2)
PS0, PS1, CHIEF, W1 = server(0), server(1), worker(0), worker(1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def named(order: tuple[TaskId, ...]) -> str:
    return "-".join(task.short for task in order)


def turned(order: tuple[TaskId, ...]) -> list[tuple[TaskId, ...]]:
    return [order[first:] + order[:first] for first in range(len(order))]


SOME = [*turned((PS0, PS1, CHIEF, W1)), *turned((W1, CHIEF, PS1, PS0))]
"""Each task is twice the first and twice the last, and of any two each comes before the other."""


@pytest.mark.parametrize("order", others_long(itertools.permutations(SHAPE.tasks()), SOME), ids=named)
def test_every_launch_order_trains(order: tuple[TaskId, ...], tmp_path: Path) -> None:
    """With the tasks of a drill: real monitors, nodes and steps, but no torch, which tasks import beside all this."""
    with DrillCluster(SHAPE, tmp_path) as cluster:
        for task in order:
            cluster.start(cluster.plan(task, steps=3))
            assert cluster.task_pid(task, 20), f"{task} has not started"
        wait_until(lambda: None not in cluster.exit_codes(), 60, "the end of the run")
        said = {log.name: log.read_text() for log in (tmp_path / "logs").iterdir()}
        assert cluster.exit_codes() == [0, 0, 0, 0], said


@pytest.mark.parametrize(
    "order",
    others_long(
        [(PS0, CHIEF, PS1, W1), (PS1, PS0, W1, CHIEF), (CHIEF, W1, PS0, PS1), (W1, CHIEF, PS1, PS0)],
        [(PS0, CHIEF, PS1, W1), (W1, CHIEF, PS1, PS0)],
    ),
    ids=named,
)
def test_a_benchmark_trains_whichever_task_is_the_first_and_whichever_the_last(order: tuple[TaskId, ...]) -> None:
    with tasks_of(SHAPE, "--num_batches=3", "--num_warmup_batches=1") as tasks:
        for task in order:
            tasks.start(task)
            wait_until(lambda task=task: tasks.task_pid(task), 20, f"{task} has started")  # type: ignore[misc]
        results = tasks.finish(60)
    assert {done.code for done in results.values()} == {0}, results
