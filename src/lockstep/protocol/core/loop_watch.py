"""Whether a worker has left out an iteration of a loop of its own, where nothing else tells.

A worker that leaves one out (``continue``) makes the same calls as the others, only with the next iteration's data:
nothing is missing before the others have one step more to make. What tells is the count of its loop, which goes on one
ahead of the others'. Workers say with each step where their loops are, and each is compared with the chief.

A count that differs is no proof by itself: a program may number its data by rank, or name a label like a counter. So a
difference is told if both have been at the same count before, both only count up or begin anew, and they have stayed
apart while both went on. It is told and not punished: a worker may leave out what it cannot use, as long as all make
the same number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.protocol.core.ids import CHIEF, Step, TaskId
from lockstep.protocol.core.messages import LoopCount

STEPS_APART = 2
"""So many steps in a row both must have gone on, apart."""


@dataclass(frozen=True, slots=True)
class IterationLeftOut:
    """In ``step`` the worker ``ahead`` is at a later iteration of the same loop than ``behind``."""

    step: Step
    loop: str
    ahead: TaskId
    behind: TaskId
    iterations: tuple[int, int]
    """Of both, in this order."""


@dataclass(slots=True)
class _Count:
    """One worker's counts in one loop."""

    first: int
    last: int = -1
    """None yet: below all."""
    growth: int = 0
    """In the newest step; below 0: the loop has begun anew."""
    counts: bool = True
    """So far it has only counted up, and begun anew where it began before."""

    def add(self, now: int) -> None:
        self.growth, self.last = 0 if self.last < 0 else now - self.last, now
        self.counts = self.counts and (self.growth >= 0 or now == self.first)


@dataclass(slots=True)
class _Pair:
    """A worker and the chief in the same loop."""

    worker: _Count
    chief: _Count
    together: bool = False
    """They have been at the same count."""
    apart: int = 0
    """For so many steps both have gone on, apart."""

    def add(self, worker: int, chief: int) -> bool:
        """Whether one of them has left something out."""
        self.worker.add(worker)
        self.chief.add(chief)
        went_on = self.worker.growth == self.chief.growth > 0
        if worker == chief:
            self.together, self.apart = True, 0
        elif went_on:
            self.apart += 1
        elif self.worker.growth or self.chief.growth:
            self.apart = 0
        return self.together and self.apart >= STEPS_APART and self.worker.counts and self.chief.counts


@dataclass(slots=True)
class LoopWatch:
    """Compares every worker with the chief, step by step, until one has left something out."""

    _step: Step = -2
    _heard: dict[TaskId, dict[str, int]] = field(default_factory=dict)
    """Of this step."""
    _pairs: dict[tuple[TaskId, str], _Pair] = field(default_factory=dict)
    _found: bool = False

    def heard(self, task: TaskId, step: Step, loops: Iterable[LoopCount]) -> IterationLeftOut | None:
        """A worker has said where it is in ``step``; returns what was left out, once."""
        if self._found or step < self._step:
            return None
        if step > self._step:
            self._step, self._heard = step, {}
        if task in self._heard:
            return None
        self._heard[task] = {one.name: one.iteration for one in loops}
        for other in list(self._heard) if task == CHIEF else [task]:
            if other != CHIEF and CHIEF in self._heard and (left_out := self._compare(other)) is not None:
                self._found = True
                return left_out
        return None

    def _compare(self, task: TaskId) -> IterationLeftOut | None:
        here, chief = self._heard[task], self._heard[CHIEF]
        found = None
        for name in (name for name in here if name in chief):
            both = (here[name], chief[name])
            pair = self._pairs.setdefault((task, name), _Pair(_Count(both[0]), _Count(both[1])))
            if pair.add(*both) and found is None:
                ahead = both[0] > both[1]
                tasks = (task, CHIEF) if ahead else (CHIEF, task)
                found = IterationLeftOut(self._step, name, *tasks, both if ahead else both[::-1])
        return found
