"""The virtual clock: what is still to happen, in order of time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """A heap of actions. Equal times keep the order in which actions were planned, so a run repeats exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._planned = 0

    def at(self, time: float, action: Action) -> None:
        """Plan an action; a time in the past means now, an infinite one never."""
        if time == math.inf:
            return
        self._planned += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float:
        """When the next action is due; there must be one."""
        return self._heap[0][0]

    def run_next(self) -> None:
        """Advance the clock to the next action and run it."""
        self.now, _, action = heapq.heappop(self._heap)
        self.done += 1
        action()
