"""Which rank keeps the others waiting, call after call, and when to look for one: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.flight.recording import Recording

_FEWEST: Final = 4
"""Calls."""
_SHARE: Final = 0.3
"""Of the time, all others wait for it."""
_TIMES_THE_NEXT: Final = 3.0
_WINDOW: Final = 30.0
_LAG_SECONDS: Final = 0.01
"""Where nothing has become slower, a smaller lag than this is no news."""
FIRST_LOOK_SECONDS: Final = 2.0
LONGEST_PAUSE_SECONDS: Final = 32.0
_STEPS_BETWEEN: Final = 6


@dataclass(frozen=True, slots=True)
class Straggler:
    """``lag``: seconds after the others, in the median of its late calls. ``share``: so much of the time they
    waited for it."""

    rank: int
    lag: float
    calls: int
    share: float


def straggler_in(recordings: Mapping[int, Recording], since: float) -> Straggler | None:
    """The rank that entered the calls since then so much later than the others that these mostly waited for it."""
    entered: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for rank, recording in recordings.items():
        for call in recording.calls:
            if call.created >= since and not call.p2p:
                entered[call.group, call.number].setdefault(rank, call.created)
    whole = [times for times in entered.values() if len(times) == len(recordings) > 1]
    # Calls that are made together, such as those of a step's buckets, are waited for once.
    lags: dict[int, list[float]] = defaultdict(list)
    before: dict[int, float] = {}
    for times in sorted(whole, key=lambda times: max(times.values())):
        last = max(times, key=lambda rank: times[rank])
        others = [at for rank, at in times.items() if rank != last]
        # Others that entered while it was still in the call before have not waited for this one since.
        lags[last].append(max(0.0, times[last] - max(median(others), before.get(last, 0.0))))
        before = times
    if not lags:
        return None
    first, final = (edge(at for times in whole for at in times.values()) for edge in (min, max))
    sums = sorted(((sum(own), rank) for rank, own in lags.items()), reverse=True)
    most, rank = sums[0]
    following = sums[1][0] if len(sums) > 1 else 0.0
    late = [lag for lag in lags[rank] if lag > most / len(lags[rank]) / 2]
    span = min(final - first, _WINDOW)
    if len(late) < _FEWEST or most < _SHARE * span or most < _TIMES_THE_NEXT * following:
        return None
    return Straggler(rank, median(late), len(late), min(1.0, most / span) if span else 1.0)


class SteadyLooks:
    """A rank that was slow from the first step makes no step slower than those before: so now and then a job is looked
    at that seems well. One look costs each rank some milliseconds of a thread of torch's own, so they become rarer."""

    def __init__(self) -> None:
        self._looks = 0
        self._suspect: int | None = None
        self.since = 0.0
        """Calls before the last look have been judged."""

    def due(self, now: float, usual: float) -> bool:
        """``usual``: what a step takes; between two looks there are some steps."""
        if not self.since:
            self.since = now  # steps have begun
        pause = min(FIRST_LOOK_SECONDS * (1 << min(self._looks, 16)), LONGEST_PAUSE_SECONDS)
        return now - self.since >= max(pause, _STEPS_BETWEEN * usual)

    def found(self, straggler: Straggler | None, now: float) -> Straggler | None:
        """What counts is the same rank in two looks, one after the other."""
        if straggler is not None and straggler.lag < _LAG_SECONDS:
            straggler = None
        again = straggler is not None and straggler.rank == self._suspect
        self._suspect = None if straggler is None else straggler.rank
        self._looks = self._looks + 1 if straggler is None or again else 0
        self.since = now
        return straggler if again else None
