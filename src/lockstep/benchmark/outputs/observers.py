"""Observers of a run: log files, TensorBoard, traces. The loop notifies each of them of the same facts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.benchmark.outputs.metrics import Accuracy, Speed

if TYPE_CHECKING:
    from lockstep.benchmark.training.evaluation import Evaluated
    from lockstep.benchmark.training.job import BenchJob


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One timed step that got a line. ``step`` counts from 0 including the warm-up, ``number`` from 1 without it."""

    number: int
    step: int
    speed: Speed
    loss: float
    learning_rate: float
    accuracy: Accuracy | None


class RunObserver:
    """Does nothing; real observers override what they need."""

    def started(self, job: BenchJob) -> None:
        """The job is ready to train."""

    def warmed_up(self) -> None:
        """The warm-up is over; the steps from here on are timed."""

    @contextlib.contextmanager
    def during(self, what: str, step: int) -> Iterator[None]:  # noqa: ARG002
        """A part of a step: ``input``, ``forward and backward``, ``update``."""
        yield

    def gradients(self, job: BenchJob, step: int) -> None:
        """Backward has ended; if this process has the gradients, they are in the parameters."""

    def step(self, facts: StepFacts) -> None:
        """A step was reported."""

    def evaluated(self, step: int, result: Evaluated) -> None:
        """An evaluation after ``step`` steps."""

    def finished(self, images_per_sec: float, step: int) -> None:
        """The timed steps are over."""

    def close(self) -> None:
        """Write whatever is still pending."""


class Observers(RunObserver):
    """All of them together."""

    def __init__(self, members: Sequence[RunObserver]) -> None:
        self._members = tuple(members)

    def started(self, job: BenchJob) -> None:
        self._tell(lambda one: one.started(job))

    def warmed_up(self) -> None:
        self._tell(lambda one: one.warmed_up())

    @contextlib.contextmanager
    def during(self, what: str, step: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in self._members:
                stack.enter_context(one.during(what, step))
            yield

    def gradients(self, job: BenchJob, step: int) -> None:
        self._tell(lambda one: one.gradients(job, step))

    def step(self, facts: StepFacts) -> None:
        self._tell(lambda one: one.step(facts))

    def evaluated(self, step: int, result: Evaluated) -> None:
        self._tell(lambda one: one.evaluated(step, result))

    def finished(self, images_per_sec: float, step: int) -> None:
        self._tell(lambda one: one.finished(images_per_sec, step))

    def close(self) -> None:
        self._tell(lambda one: one.close())

    def _tell(self, call: Callable[[RunObserver], None]) -> None:
        for one in self._members:
            call(one)
