"""Every random choice of a run, from one seeded source."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TypeVar

from lockstep.protocol.ids import Incarnation
from lockstep.sim.scenario import Span

Item = TypeVar("Item")


class Dice:
    """Draws in the words of the simulator."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def seconds(self, span: Span) -> float:
        return span.low + (span.high - span.low) * self._random.random()

    def chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        drawn = list(items)
        self._random.shuffle(drawn)
        return drawn

    def incarnation(self) -> Incarnation:
        """64 bits that are not 0."""
        return self._random.getrandbits(63) + 1
