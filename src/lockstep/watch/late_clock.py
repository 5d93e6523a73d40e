"""When a step of a watched job is late, and when steps have become slow: pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.protocol.core.timing import FIRST_STEPS_NOTICE_SECONDS, NOTICE_SECONDS

LATE_FACTOR: Final = 3.0
_KEPT: Final = 64
_FIRST: Final = 3
"""Steps before which nothing is usual."""
_RECENT: Final = 10
_FEWEST_RECENT: Final = 5
_RECENT_SECONDS: Final = 3.0
"""So long steps must have been slow; of long ones, fewer are enough for that."""
_AT_ONCE: Final = 8
"""Of many steps between two looks, so many count."""
_SLOW_FACTOR: Final = 1.8
_SLOW_SECONDS: Final = 0.03


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Steps take longer than they used to."""

    step: int
    recent: float
    usual: float


class LateClock:
    """Told how many steps each rank has made, and when its last one ended."""

    def __init__(self, now: float) -> None:
        self.moved = now
        """When anything last moved, by this host's clock."""
        self._steps: dict[int, int] = {}
        self._highest = 0
        self._ended = 0.0
        self._times: deque[float] = deque(maxlen=_KEPT)

    @property
    def step(self) -> int:
        """The last that all ranks have ended, as far as they count."""
        return min(self._steps.values(), default=0)

    @property
    def usual(self) -> float:
        """0: not known yet."""
        return median(self._times) if len(self._times) >= _FIRST else 0.0

    def note(self, steps: Mapping[int, tuple[int, float]], now: float) -> bool:
        """``steps``: of each rank, how many it has made, and when the last ended. Whether any has moved."""
        changed = {rank: step for rank, (step, _) in steps.items() if step != self._steps.get(rank, 0)}
        if not changed:
            return False
        self.moved = now
        self._steps |= changed
        highest, ended = max((step, at) for step, at in steps.values())
        if self._highest and 0 < self._highest < highest and ended > self._ended:
            count = highest - self._highest
            self._times.extend([(ended - self._ended) / count] * min(count, _AT_ONCE))
        self._highest, self._ended = highest, ended
        return True

    def alive(self, now: float) -> None:
        """Collectives end, though no step does."""
        self.moved = now

    @property
    def late_at(self) -> float:
        """From then on a step is late."""
        floor = NOTICE_SECONDS if len(self._times) >= _FIRST else FIRST_STEPS_NOTICE_SECONDS
        return self.moved + max(floor, LATE_FACTOR * self.usual)

    def late(self, now: float) -> bool:
        return now >= self.late_at

    def slowdown(self) -> Slowdown | None:
        """The last few steps against all before."""
        times = list(self._times)
        if len(times) < 2 * _RECENT:
            return None
        count = _FEWEST_RECENT
        while count < _RECENT and sum(times[-count:]) < _RECENT_SECONDS:
            count += 1
        before, recent = median(times[:-count]), min(times[-count:])
        if recent < _SLOW_FACTOR * before + _SLOW_SECONDS:
            return None
        return Slowdown(self._highest, recent, before)
