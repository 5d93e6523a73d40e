"""What the steps of a task have taken so far, counted up from its journal: metrics outlive a ring of records.

It is made when somebody asks for metrics for the first time, and fed by the sampler with the rows that it reads anyway:
a task that nobody asks has no tally, and no step pays for one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final

from lockstep.protocol.core.ids import Role, Step, TaskId
from lockstep.protocol.core.journal import NO_STEP, Happening, Row
from lockstep.protocol.core.parts import Part

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: from the shortest step that makes sense to one that waited for a lost task."""

HELD_UP: Final = 2.0
"""A step counts as work for at most so many times its usual length; the rest of it was a delay."""

# Compared with every row of a journal: a plain name is found faster than a member of an enum.
_ARRIVED: Final = Happening.ARRIVED
_SEALED: Final = Happening.SEALED
_PRODUCED: Final = Happening.PRODUCED
_COMMITTED: Final = Happening.COMMITTED

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
    """Sums over all steps since it was made. Written by one thread, read by any.

    A step of two milliseconds must not notice it: no dictionary here has members of an enum in its keys, whose hashes
    are made in Python.
    """

    def __init__(self, role: Role) -> None:
        self.steps = Histogram()
        self.productive = 0.0
        """Seconds of steps, each counted as work for as long as steps usually take."""
        self.counted = 0
        self._works = role is Role.WORKER
        self._waiting = Histogram()
        self._busy = Histogram()
        self._waited: dict[int, list[Any]] = {}
        """By the number of a peer, because all whose tensors arrive here have the same role: the peer, the seconds."""
        self._longest = float("inf")
        self._first: dict[Step, float] = {}
        self._last: dict[Step, Row] = {}
        self._made: dict[Step, float] = {}
        self._ended: Step = NO_STEP
        self._ended_at = 0.0

    @property
    def parts(self) -> dict[Part, Histogram]:
        """How long the parts of steps took."""
        names = (Part.WAITING, Part.COMPUTING) if self._works else (Part.COLLECTING, Part.UPDATING)
        return dict(zip(names, (self._waiting, self._busy), strict=True))

    @property
    def waited(self) -> dict[TaskId, float]:
        """Seconds waited for each peer: for the one that came last in a step."""
        return {cell[0]: cell[1] for cell in list(self._waited.values())}

    def read(self, rows: Iterable[Row], usual: float) -> None:
        """Count these rows, the oldest first. ``usual``: the median of the last steps; 0 if not known."""
        self._longest = HELD_UP * usual or float("inf")
        if self._works:
            self._of_worker(rows)
        else:
            self._of_server(rows)
        for known in (self._first, self._last, self._made):
            while len(known) > _MOST_OPEN:
                del known[next(iter(known))]

    def _of_worker(self, rows: Iterable[Row]) -> None:
        """It waits from one seal to the last arrival of the next version, and computes from there to its own seal."""
        last = self._last
        for row in rows:
            happening = row[1]
            if happening is _ARRIVED:
                if not row[6]:
                    last[row[2]] = row
            elif happening is _SEALED and row[4] is None and not row[6]:
                self._sealed(row[2], row[0])

    def _sealed(self, step: Step, at: float) -> None:
        before, arrived = self._end_step(step, at), self._last.pop(step, None)
        if arrived is None or arrived[0] > at:
            return
        self._busy.add(at - arrived[0])
        if before is not None and arrived[0] >= before:
            self._wait_for(arrived[4], arrived[0] - before)

    def _of_server(self, rows: Iterable[Row]) -> None:
        """It collects from the first gradient of a step to its last, and updates from there to the last new version."""
        first, last, made = self._first, self._last, self._made
        for row in rows:
            happening = row[1]
            if happening is _ARRIVED:
                step = row[2]
                if step not in first:
                    first[step] = row[0]
                last[step] = row
            elif happening is _PRODUCED:
                made[row[2] - 1] = row[0]
            elif happening is _COMMITTED and row[4] is None and row[2] in last:
                self._committed(row[2], row[0])

    def _committed(self, step: Step, at: float) -> None:
        first, last, made = self._first.pop(step), self._last.pop(step), self._made.pop(step, None)
        if step < 0:
            return  # the chief's parameters, which are no step
        self._end_step(step, at)
        self._wait_for(last[4], last[0] - first)
        if made is not None and made >= last[0]:
            self._busy.add(made - last[0])

    def _end_step(self, step: Step, at: float) -> float | None:
        """Count a step that has ended; returns when the one before it had."""
        before = self._ended_at if self._ended == step - 1 else None
        self._ended, self._ended_at = step, at
        if before is not None:
            seconds = at - before
            self.steps.add(seconds)
            self.counted += 1
            self.productive += seconds if seconds < self._longest else self._longest
        return before

    def _wait_for(self, peer: TaskId | None, seconds: float) -> None:
        self._waiting.add(seconds)
        if peer is None:
            return  # inside torch.distributed: nobody knows for whom
        cell = self._waited.get(peer.index)
        if cell is None:
            self._waited[peer.index] = [peer, seconds]
        else:
            cell[1] += seconds
