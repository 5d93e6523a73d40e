"""A server's records of second homes: what it has handed on of its own buckets, and what others hand on to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, TaskId
from lockstep.protocol.core.messages import HandOn, Ticket, View
from lockstep.protocol.core.placement import Homes, Placement
from lockstep.protocol.core.plan import Plan

_Life = tuple[TaskId, Incarnation]

NOTHING = INITIAL_STEP - 1
"""The version of a bucket at a second home that holds nothing of it."""


@dataclass(slots=True)
class OtherServer:
    """What this server knows of another one."""

    incarnation: Incarnation = 0
    linked: bool = False
    grant: Ticket | None = None
    """Where means for it go."""


@dataclass(slots=True)
class HandedBucket:
    """A bucket at its home, as far as its second home is concerned."""

    update: HandOn | None = None
    """What made, or makes, the version that is not known yet."""
    is_ready: bool = False
    """The mean is where it can be handed on."""
    flying: bool = False
    """The mean is being read on its way to the second home: no other may be written in its place."""
    held: int = NOTHING
    """The version that the second home has."""
    since: float = 0.0
    """When the version that is not known yet was made here."""
    second: _Life | None = None
    """The second home that all this is about."""

    edition: int = 0
    """How often a program has loaded another state of its optimizer."""
    copied_edition: int = 0
    """That of the last copy that was begun."""
    held_edition: int = 0
    """That of what the second home has."""
    copied: int = NOTHING
    """The version that was copied to it, if it had nothing at first: it has none before that."""
    copying: bool = False
    """It is being copied now: no update may change it."""
    in_step: bool = False
    """It has had the newest version once; from then on, no version is known that it does not have."""
    digests: tuple[str, str] = ("", "")
    """Of the version that is not known yet, as it was made here and there; empty: not yet, or not compared."""

    @property
    def differs(self) -> bool:
        """Whether both homes made something else of the same update."""
        return all(self.digests) and self.digests[0] != self.digests[1]

    @property
    def is_outdated(self) -> bool:
        """The second home, if it has the bucket, has it with a state from before one that was loaded."""
        return self.held_edition < self.edition

    def hand_to(self, second: _Life | None) -> None:
        """The second home in the view; another one has nothing yet."""
        if second != self.second:
            self.second, self.flying, self.held = second, False, NOTHING
            self.copied, self.copying, self.in_step = NOTHING, False, False
            self.copied_edition = self.held_edition = 0


@dataclass(slots=True)
class SecondBucket:
    """A bucket at its second home. The store makes one version of it at a time, of what was handed on."""

    version: int
    update: HandOn | None = None
    arrival: int = 0
    """The number of the mean, once it is here."""
    making: bool = False
    parts: bytearray = field(default_factory=bytearray)
    """What has come of a copy."""
    edition: int = 0
    """Of the last copy that was taken."""
    taking: int = 0
    """Of the copy that is being taken."""


@dataclass(slots=True)
class Places:
    """Where everything lives in the view that this server is in."""

    placement: Placement
    view: int = 0
    lives: dict[TaskId, Incarnation] = field(default_factory=dict)
    plan: Plan | None = None

    def take(self, view: View) -> bool:
        """Whether this view is newer than the one that is known."""
        if not view.shards or view.number <= self.view:
            return False
        self.view = view.number
        self.placement = Placement(view.shards, view.decisions[0])
        self.lives = {TaskId.parse(member.task): member.incarnation for member in view.members}
        return True

    def second_life(self, bucket: BucketId) -> _Life | None:
        second = self.of(bucket).second_task
        return None if second is None else (second, self.lives.get(second, 0))

    def of(self, bucket: BucketId) -> Homes:
        assert self.plan is not None
        return self.placement.shards[self.plan.buckets[bucket].server]
