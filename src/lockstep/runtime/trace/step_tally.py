"""What the steps of a task have taken so far, counted up from its journal: metrics outlive a ring of records.

It is made when somebody asks for metrics for the first time, and fed by the sampler with the rows that it reads anyway:
a task that nobody asks has no tally, and no step pays for one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final

from lockstep.protocol.core.ids import Role, Step, TaskId
from lockstep.protocol.core.journal import Happening, Row
from lockstep.protocol.core.parts import Part

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: from the shortest step that makes sense to one that waited for a lost task."""

HELD_UP: Final = 2.0
"""A step counts as work for at most so many times its usual length; the rest of it was a delay."""

_MOST_OPEN: Final = 64
"""Steps that are known in part. Without a common step (asynchronous training) none is ever completed."""


class Histogram:
    """How many durations lie below each of ``BOUNDS``, and what they add up to."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def fields(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "seconds": self.seconds}


class StepTally:
    """Sums over all steps since it was made. Written by one thread, read by any."""

    def __init__(self, role: Role) -> None:
        self.steps = Histogram()
        self.parts: dict[Part, Histogram] = {}
        self.waited: dict[TaskId, float] = {}
        """Seconds waited for each peer: for the one that came last in a step."""
        self.productive = 0.0
        """Seconds of steps, each counted as work for as long as steps usually take."""
        self.counted = 0
        self._read_row = self._of_worker if role is Role.WORKER else self._of_server
        self._usual = 0.0
        self._first: dict[Step, float] = {}
        self._last: dict[Step, tuple[float, TaskId | None]] = {}
        self._made: dict[Step, float] = {}
        self._ended: tuple[Step, float] | None = None

    def read(self, rows: Iterable[Row], usual: float) -> None:
        """Count these rows, the oldest first. ``usual``: the median of the last steps; 0 if not known."""
        self._usual = usual
        for row in rows:
            self._read_row(row)
        for known in (self._first, self._last, self._made):
            while len(known) > _MOST_OPEN:
                del known[next(iter(known))]

    def _of_worker(self, row: Row) -> None:
        """It waits from one seal to the last arrival of the next version, and computes from there to its own seal."""
        at, happening, step, _, peer, _, share = row
        if happening is Happening.ARRIVED:
            if not share:
                self._last[step] = (at, peer)
        elif happening is Happening.SEALED and peer is None and not share:
            before = self._end_step(step, at)
            arrived = self._last.pop(step, None)
            if arrived is None or arrived[0] > at:
                return
            self._add(Part.COMPUTING, at - arrived[0])
            if before is not None and arrived[0] >= before:
                self._add(Part.WAITING, arrived[0] - before)
                self._wait_for(arrived[1], arrived[0] - before)

    def _of_server(self, row: Row) -> None:
        """It collects from the first gradient of a step to its last, and updates from there to the last new version."""
        at, happening, step, _, peer, _, _ = row
        if step < 0:
            return  # the chief's parameters, which are no step
        if happening is Happening.ARRIVED:
            self._first.setdefault(step, at)
            self._last[step] = (at, peer)
        elif happening is Happening.PRODUCED:
            self._made[step - 1] = at
        elif happening is Happening.COMMITTED and peer is None:
            self._end_step(step, at)
            first, last, made = self._first.pop(step, None), self._last.pop(step, None), self._made.pop(step, None)
            if first is None or last is None:
                return
            self._add(Part.COLLECTING, last[0] - first)
            self._wait_for(last[1], last[0] - first)
            if made is not None and made >= last[0]:
                self._add(Part.UPDATING, made - last[0])

    def _end_step(self, step: Step, at: float) -> float | None:
        """Count a step that has ended; returns when the one before it had."""
        before, self._ended = self._ended, (step, at)
        if before is None or before[0] != step - 1:
            return None
        seconds = at - before[1]
        self.steps.add(seconds)
        self.counted += 1
        self.productive += min(seconds, HELD_UP * self._usual) if self._usual else seconds
        return before[1]

    def _add(self, part: Part, seconds: float) -> None:
        if part not in self.parts:
            self.parts[part] = Histogram()
        self.parts[part].add(seconds)

    def _wait_for(self, peer: TaskId | None, seconds: float) -> None:
        if peer is not None:
            self.waited[peer] = self.waited.get(peer, 0.0) + seconds
