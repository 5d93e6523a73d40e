"""What goes wrong on the network by chance, recorded as it happens so that a run can be repeated with less of it.

Each mishap is plain data: its kind, its way, and the number of the chance of that kind on that way. A run is played
either *by chance* (each chance is drawn, until the network is quiet) or *by plan* (exactly these mishaps).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from lockstep.protocol.core.ids import TaskId
from lockstep.sim.rng import SeededRandom
from lockstep.sim.scenario import Mishap, NetworkProfile


class Chance(StrEnum):
    """The kinds of mishaps."""

    LATE = "late"
    DOUBLED = "doubled"
    RESET = "reset"
    FAILED = "failed"
    GHOST = "ghost"


_SALT = {kind: 1009 * (number + 1) for number, kind in enumerate(Chance)}


class WayLike(Protocol):
    """One direction of a link: from ``peer`` to ``task``."""

    @property
    def task(self) -> TaskId: ...

    @property
    def peer(self) -> TaskId: ...

    @property
    def place(self) -> int: ...

    @property
    def chances(self) -> dict[str, int]: ...


class NetworkFaults:
    """Decides, chance by chance, what goes wrong."""

    def __init__(self, profile: NetworkProfile, rng: SeededRandom, planned: Iterable[Mishap] | None) -> None:
        self.happened: list[Mishap] = []
        self._profile = profile
        self._rng = rng
        self._by_plan = planned is not None
        self._planned = {(m.kind, m.task, m.peer, m.number): m for m in planned or ()}
        self._resets = 0
        self._odds = {
            Chance.LATE: profile.late_chance,
            Chance.DOUBLED: profile.duplicate_chance,
            Chance.RESET: profile.reset_chance,
            Chance.FAILED: profile.transfer_failure_chance,
            Chance.GHOST: profile.ghost_chance,
        }
        self.fair = not self._planned if self._by_plan else not any(self._odds.values())
        """Whether nothing can go wrong at all, so that no draw is needed."""

    def strikes(self, kind: Chance, way: WayLike, now: float) -> Mishap | None:
        """The mishap of this kind that happens now on this way, if one does."""
        if self.fair:
            return None
        number = way.chances.get(kind, 0) + 1
        way.chances[kind] = number
        if self._by_plan:
            mishap = self._planned.get((kind.value, way.peer.short, way.task.short, number))
        else:
            mishap = self._drawn(kind, way, number, now)
        if mishap is not None:
            self.happened.append(mishap)
        return mishap

    def _drawn(self, kind: Chance, way: WayLike, number: int, now: float) -> Mishap | None:
        odds = self._odds[kind]
        if not odds or now >= self._profile.quiet_after:
            return None
        if kind is Chance.RESET and self._resets >= self._profile.max_resets:
            return None
        if self._rng.at(way.place + _SALT[kind], number) >= odds:
            return None
        self._resets += kind is Chance.RESET
        seconds = self._rng.seconds_at(self._profile.late, way.place - 1, number) if kind is Chance.LATE else 0.0
        return Mishap(kind.value, way.peer.short, way.task.short, number, round(seconds, 3))
