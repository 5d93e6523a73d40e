"""A server's records of second homes: what it has handed on of its own buckets, and what others hand on to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, TaskId
from lockstep.protocol.core.messages import BucketCopy, HandOn, Ticket, View
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


class OtherServers:
    """The other servers of the job, as far as this one reaches them."""

    def __init__(self, others: Iterable[TaskId], places: Places) -> None:
        self.by_task = {other: OtherServer() for other in others}
        self._places = places

    @property
    def linked(self) -> list[TaskId]:
        return [task for task, other in self.by_task.items() if other.linked]

    def on_link_up(self, peer: TaskId, incarnation: Incarnation) -> None:
        self.by_task[peer] = OtherServer(incarnation, linked=True)

    def on_link_lost(self, peer: TaskId) -> None:
        self.by_task[peer] = OtherServer(self.by_task[peer].incarnation)

    def reaches(self, task: TaskId | None) -> bool:
        """Whether this server is there, in the incarnation that belongs to the view."""
        if task is None or task not in self.by_task:
            return False
        other = self.by_task[task]
        return other.linked and other.incarnation == self._places.lives.get(task)


@dataclass(slots=True)
class HandedBucket:
    """A bucket at its home, as far as its second home is concerned."""

    update: HandOn | None = None
    """What made, or makes, the version that is not known yet."""
    is_ready: bool = False
    """The mean is where it can be handed on."""
    sent: bool = False
    """It was sent, over the link that there is: if no answer comes, that is repeated."""
    flying: bool = False
    """The mean is being read, on its way to the second home or there: no other may be written in its place."""
    lent: bool = False
    """The link was lost while it was flying: the second home may still read it, until it says that it does not."""
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
            self.second, self.held = second, NOTHING
            self.sent = self.flying = self.lent = False
            self.copied, self.copying, self.in_step = NOTHING, False, False
            self.copied_edition = self.held_edition = 0


class HeldUpdate(NamedTuple):
    """What a version is made of, at a second home."""

    update: HandOn
    arrival: int
    """The number of the mean; 0 without one."""


@dataclass(slots=True)
class SecondBucket:
    """A bucket at its second home. The store makes one version of it at a time, of what was handed on."""

    version: int
    """The newest one that was made."""
    held: deque[HeldUpdate] = field(default_factory=deque)
    """What the versions after it are made of; the store makes the first of them."""
    update: HandOn | None = None
    """Of the next one, while its mean is missing."""
    arrival: int = 0
    """The number of its mean, while all else is missing."""
    owes_word: bool = False
    """The home has lost sight of what is read here, and is told when nothing is any more."""
    parts: bytearray = field(default_factory=bytearray)
    """What has come of a copy."""
    copy: BucketCopy | None = None
    """A whole one, which is being taken, or waits until what is held is made."""
    taking: bool = False
    edition: int = 0
    """Of the last copy that was taken."""

    @property
    def holds(self) -> int:
        """The newest version that can be made of what is here."""
        return self.version + len(self.held)

    @property
    def is_busy(self) -> bool:
        """The store has something to do with it."""
        return bool(self.held) or self.copy is not None


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
