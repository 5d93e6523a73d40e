"""Every random choice of a run, from one seeded source."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TypeVar

from lockstep.protocol.core.ids import Incarnation
from lockstep.sim.scenario import SecondsRange

Item = TypeVar("Item")

_TABLE = 1 << 14
_STRIDE = 7919


class SeededRandom:
    """Random draws in the simulator's terms.

    What happens on a link, or to the work of a task, is drawn by *place*: the n-th draw of a place is the same whatever
    happens elsewhere. So removing a fault from a run changes only what it touched, not every number after it.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._table: list[float] = []

    def place(self) -> int:
        """A new, independent source of draws."""
        return self._random.getrandbits(30)

    def at(self, place: int, number: int) -> float:
        """The ``number``-th draw of a place, uniform between 0 and 1."""
        if not self._table:
            draw = Random(self._random.getrandbits(64)).random
            self._table = [draw() for _ in range(_TABLE)]
        return self._table[(place + number * _STRIDE) % _TABLE]

    def seconds_at(self, span: SecondsRange, place: int, number: int) -> float:
        if span.high == span.low:
            return span.low
        return span.low + (span.high - span.low) * self.at(place, number)

    def seconds(self, span: SecondsRange) -> float:
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
