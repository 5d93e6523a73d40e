"""Where the time of a step goes, read from the journals of the tasks of one machine, without further measurements.

A step on a worker, by what it waits for after its backward has ended::

    computing    its version is here .. backward has ended
    others       .. the backward of the slowest worker has ended
    gradients    .. the last gradient of the step is on its server
    update       .. the last bucket is reduced and updated
    parameters   .. the next version is here

The last four are exposed: the training thread waits. Clocks of one machine agree; with several machines only the first
and the sum of the others are meaningful.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.protocol.core.ids import Step
from lockstep.protocol.core.journal import Happening, Record

Moments = dict[Step, tuple[float, float]]
"""Two moments of each step: on a worker (ready, sealed), on a server (last arrival, last update)."""


@dataclass(frozen=True, slots=True)
class StepShares:
    """Seconds of one step, the mean over steps and workers."""

    steps: int
    computing: float
    others: float
    gradients: float
    update: float
    parameters: float

    @property
    def exposed(self) -> float:
        """How long the training thread waits."""
        return self.others + self.gradients + self.update + self.parameters


def worker_moments(records: Iterable[Record], blocked: Mapping[Step, float] | None = None) -> Moments:
    """When each step's version was here, and when its backward had ended.

    ``blocked``: seconds that the training thread really waited for a step's version. If forward began before all of it
    was here, the version counts as here when that time had passed: the rest of the transfer was hidden.
    """
    ready: dict[Step, float] = {}
    sealed: dict[Step, float] = {}
    for record in [one for one in records if not one.share]:
        if record.happening is Happening.ARRIVED:
            ready[record.step] = record.at
        elif record.happening is Happening.SEALED:
            sealed[record.step] = record.at
    for step, seconds in (blocked or {}).items():
        if step in ready and step - 1 in sealed:
            ready[step] = min(ready[step], sealed[step - 1] + seconds)
    return {step: (ready[step], at) for step, at in sealed.items() if step in ready}


def server_moments(records: Iterable[Record]) -> Moments:
    """When the last gradient of each step was here, and when its last bucket was updated."""
    arrived: dict[Step, float] = {}
    updated: dict[Step, float] = {}
    for record in records:
        if record.happening is Happening.ARRIVED:
            arrived[record.step] = record.at
        elif record.happening is Happening.PRODUCED:
            updated[record.step - 1] = record.at
    return {step: (at, updated[step]) for step, at in arrived.items() if step in updated}


def computing_and_waiting(moments: Moments) -> tuple[float, float]:
    """What one worker knows by itself: the mean seconds of a step in which it computes, and in which it waits."""
    whole = [step for step in moments if step + 1 in moments]
    if not whole:
        return 0.0, 0.0
    computing = statistics.fmean(moments[step][1] - moments[step][0] for step in whole)
    waiting = statistics.fmean(moments[step + 1][0] - moments[step][1] for step in whole)
    return computing, waiting


def step_shares(workers: Sequence[Mapping[Step, tuple[float, float]]], servers: Sequence[Moments]) -> StepShares | None:
    """The shares of a step; None if the journals have no step in common."""
    rows: list[tuple[float, ...]] = []
    steps = {step for step in workers[0] if _is_whole(step, workers, servers)} if workers and servers else set()
    for step in steps:
        last_sealed = max(moments[step][1] for moments in workers)
        last_arrived = max(moments[step][0] for moments in servers)
        last_updated = max(moments[step][1] for moments in servers)
        for moments in workers:
            ready, sealed = moments[step]
            rows.append(_row(ready, sealed, last_sealed, last_arrived, last_updated, moments[step + 1][0]))
    if not rows:
        return None
    return StepShares(len(steps), *(statistics.fmean(row[part] for row in rows) for part in range(5)))


def _is_whole(step: Step, workers: Sequence[Mapping[Step, tuple[float, float]]], servers: Sequence[Moments]) -> bool:
    return all(step in m and step + 1 in m for m in workers) and all(step in m for m in servers)


def _row(ready: float, *moments: float) -> tuple[float, ...]:
    """The lengths between moments that should follow each other; one that has already passed takes no time."""
    lengths = []
    reached, end = ready, moments[-1]
    for moment in moments:
        bounded = min(max(moment, reached), end) if moment is not end else max(end, reached)
        lengths.append(bounded - reached)
        reached = bounded
    return tuple(lengths)
