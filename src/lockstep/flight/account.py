"""What the recordings of all ranks prove: values only. ``analysis.py`` makes them, ``diagnosis.py`` words them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lockstep.flight.groups import RankGroup
from lockstep.flight.recording import RecordedCall


class Standing(StrEnum):
    """Where one rank stands with one call of a group."""

    OPEN = "in it"
    DONE = "done"
    GIVEN_UP = "gave up on it"
    """It has left a call that cannot have succeeded."""
    ABSENT = "has not entered it"
    UNCLEAR = "cannot be told"
    """The ring has wrapped, or the dump was taken before the call."""
    NO_DUMP = "left no dump"


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of one group. ``peers``: of a send or receive, from whom and to whom, as ranks of the job."""

    group: RankGroup
    number: int
    operation: str
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StuckCall:
    """A call that somebody is in, or had to give up on."""

    collective: Collective
    standings: Mapping[int, Standing]
    calls: Mapping[int, RecordedCall]
    """Of those who are in it, or were."""
    began: float
    """When the first rank entered it; 0: not known."""

    def ranks(self, *standings: Standing) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, one in self.standings.items() if one in standings))

    @property
    def waiting(self) -> tuple[int, ...]:
        return self.ranks(Standing.OPEN, Standing.GIVEN_UP)

    @property
    def missing(self) -> tuple[int, ...]:
        return self.ranks(Standing.ABSENT)

    @property
    def silent(self) -> tuple[int, ...]:
        return self.ranks(Standing.NO_DUMP)

    @property
    def unclear(self) -> tuple[int, ...]:
        return self.ranks(Standing.UNCLEAR)

    @property
    def complete(self) -> bool:
        """Everybody who is known has entered it."""
        return not self.missing and not self.silent and not self.unclear


class Aspect(StrEnum):
    """In what the calls with one number differ."""

    OPERATION = "operation"
    SIZE = "size"
    DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class CallSide:
    """Ranks that agree with one another, and one of their calls."""

    ranks: tuple[int, ...]
    call: RecordedCall


@dataclass(frozen=True, slots=True)
class Difference:
    """Calls that have the same number and are not the same call. The first side has the most ranks."""

    collective: Collective
    aspect: Aspect
    sides: tuple[CallSide, ...]
    over: bool
    """All have left it: it ran all the same, or failed."""

    @property
    def odd(self) -> tuple[int, ...]:
        """All but the first side."""
        return tuple(sorted(rank for side in self.sides[1:] for rank in side.ranks))


@dataclass(frozen=True, slots=True)
class RingLeg:
    """One wait of a ring: ``rank`` is in a call that ``on`` has not entered."""

    rank: int
    stuck: StuckCall
    on: int


@dataclass(frozen=True, slots=True)
class OppositeOrder:
    """Two ranks that entered the same two calls in opposite order."""

    first: StuckCall
    second: StuckCall
    rank: int
    """Entered ``first`` first."""
    other: int
    """Entered ``second`` first."""


class Explanation(StrEnum):
    """What explains the rest."""

    DIFFERENCE = "difference"
    RING = "ring"
    ORDER = "order"
    NOT_ENTERED = "not entered"
    NO_DUMP = "no dump"
    UNCLEAR = "unclear"
    OUTSIDERS = "outsiders"
    """All who are known to belong to the group are in the call; others may belong to it, too."""
    ITSELF = "the collective itself"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """All that is proven. ``kind`` says which of the fields explains the rest."""

    kind: Explanation
    world: tuple[int, ...]
    no_dump: tuple[int, ...]
    """Ranks that left none, as far as the others know of them."""
    wrapped: Mapping[int, int]
    """How many calls the ring of a rank has overwritten."""
    last: Mapping[int, RecordedCall]
    """What each rank did last: the first call that it is in, or else its last one."""
    stuck: tuple[StuckCall, ...] = ()
    """In the order in which they began; the one that explains the others is ``root``."""
    root: StuckCall | None = None
    culprits: tuple[int, ...] = ()
    """The ranks to look at, where it is ranks that are missing."""
    difference: Difference | None = None
    ring: tuple[RingLeg, ...] = ()
    order: OppositeOrder | None = None
    also: tuple[Difference, ...] = ()
    """Differences that do not explain it."""
