"""Which rank keeps the others waiting, call after call: pure."""

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


@dataclass(frozen=True, slots=True)
class Straggler:
    """``lag``: seconds after the others, in the median of its late calls."""

    rank: int
    lag: float
    calls: int


def straggler_in(recordings: Mapping[int, Recording], since: float) -> Straggler | None:
    """The rank that entered the calls since then so much later than the others that these mostly waited for it."""
    entered: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for rank, recording in recordings.items():
        for call in recording.calls:
            if call.created >= since and not call.p2p:
                entered[call.group, call.number].setdefault(rank, call.created)
    whole = [times for times in entered.values() if len(times) == len(recordings) > 1]
    lags: dict[int, list[float]] = defaultdict(list)
    for times in whole:
        last = max(times, key=lambda rank: times[rank])
        lags[last].append(times[last] - median(at for rank, at in times.items() if rank != last))
    if not lags:
        return None
    first, final = (edge(at for times in whole for at in times.values()) for edge in (min, max))
    sums = sorted(((sum(own), rank) for rank, own in lags.items()), reverse=True)
    most, rank = sums[0]
    following = sums[1][0] if len(sums) > 1 else 0.0
    late = [lag for lag in lags[rank] if lag > most / len(lags[rank]) / 2]
    if len(late) < _FEWEST or most < _SHARE * min(final - first, _WINDOW) or most < _TIMES_THE_NEXT * following:
        return None
    return Straggler(rank, median(late), len(late))
