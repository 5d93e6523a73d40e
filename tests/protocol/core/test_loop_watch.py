"""When it is told that a worker has left out an iteration of its own loop, and when it is not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lockstep.protocol.core.ids import CHIEF, worker
from lockstep.protocol.core.loop_watch import IterationLeftOut, LoopWatch
from lockstep.protocol.core.messages import LoopCount

OTHER = worker(1)


def told(chief: Sequence[int], other: Sequence[int]) -> list[IterationLeftOut]:
    """What is told if the two are at these iterations, step by step."""
    watch = LoopWatch()
    found = []
    for step, (one, two) in enumerate(zip(chief, other, strict=False)):
        for task, count in ((CHIEF, one), (OTHER, two)) if step % 2 else ((OTHER, two), (CHIEF, one)):
            found.append(watch.heard(task, step, (LoopCount("i", count),)))
    return [one for one in found if one is not None]


def skipping(number: int) -> list[int]:
    return [count for count in range(30) if count != number]


@pytest.mark.parametrize("number", [1, 3, 20])
def test_an_iteration_left_out_is_told_once_and_two_steps_later(number: int) -> None:
    step = number + 2
    assert told(range(30), skipping(number)) == [IterationLeftOut(step, "i", OTHER, CHIEF, (step + 1, step))]
    assert told(skipping(number), range(30)) == [IterationLeftOut(step, "i", CHIEF, OTHER, (step + 1, step))]


@pytest.mark.parametrize(
    ("chief", "other"),
    [
        (range(30), range(30)),
        ([*range(10), *range(10)], [*range(10), *range(10)]),  # epochs
        (range(0, 60, 2), range(1, 60, 2)),  # numbered by rank
        (range(3, 60, 4), range(3, 60, 4)),  # gradients are accumulated
        ([0] * 30, [0] * 29 + [1]),  # the loop around
        (range(30), [*range(10), *range(11, 31)][:11]),  # ends before it is certain
    ],
)
def test_loops_that_are_as_they_should_be_are_left_alone(chief: Sequence[int], other: Sequence[int]) -> None:
    assert not told(chief, other)


def test_numbers_that_do_not_count_are_left_alone() -> None:
    draw = random.Random(1)
    for _ in range(200):
        labels = [[draw.randrange(10) for _ in range(200)] for _ in range(2)]
        assert not told(*labels)


def test_only_loops_that_both_are_in_are_compared() -> None:
    watch = LoopWatch()
    for step in range(10):
        assert watch.heard(CHIEF, step, (LoopCount("i", step),)) is None
        assert watch.heard(OTHER, step, (LoopCount("j", 2 * step),)) is None
