"""In the timed steps Python's garbage collector leaves alone what was there before; afterwards it does not."""

from __future__ import annotations

import gc

import pytest

from benchmark.runs import run
from lockstep.benchmark.outputs.observers import RunObserver, StepFacts
from lockstep.runtime.garbage import spared_collector


class Frozen(RunObserver):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def step(self, facts: StepFacts) -> None:
        self.counts.append(gc.get_freeze_count())


def test_what_was_there_before_the_timed_steps_is_left_alone_in_them() -> None:
    gc.unfreeze()  # whatever a test before has left
    before, observer = gc.get_freeze_count(), Frozen()
    run(observer=observer, steps=2)
    assert observer.counts
    assert min(observer.counts) > before + 10_000
    assert gc.get_freeze_count() <= before


def test_everything_counts_again_also_after_an_error() -> None:
    before = gc.get_freeze_count()

    def fails() -> None:
        with spared_collector():
            assert gc.get_freeze_count() > before
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_freeze_count() <= before
