"""A server's records: what has arrived for each bucket, by sender, and what each worker has asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.effects import Effect, GiveBack
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import Layout, Pull, Seal


class ServedBucketState(StrEnum):
    COLLECTING = "collecting"
    COMPLETE = "complete"
    APPLYING = "applying"


class ServedBucketTrigger(StrEnum):
    COMPLETE = "last gradient arrived"
    REOPEN = "a gradient is missing again"
    APPLY = "applying began"
    APPLIED = "next version made"


SERVED_BUCKET_TRANSITIONS: Mapping[tuple[ServedBucketState, ServedBucketTrigger], ServedBucketState] = MappingProxyType(
    {
        (ServedBucketState.COLLECTING, ServedBucketTrigger.COMPLETE): ServedBucketState.COMPLETE,
        (ServedBucketState.COMPLETE, ServedBucketTrigger.REOPEN): ServedBucketState.COLLECTING,
        (ServedBucketState.COMPLETE, ServedBucketTrigger.APPLY): ServedBucketState.APPLYING,
        (ServedBucketState.APPLYING, ServedBucketTrigger.APPLIED): ServedBucketState.COLLECTING,
    }
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One sender's gradient of a bucket: its edition, and the number under which the task keeps it."""

    edition: int
    number: int


NO_GRADIENT = Arrival(-1, -1)
"""The sender has no gradient for this bucket in this step."""


def sealed_edition(seal: Seal | None, step: Step, bucket: BucketId) -> int | None:
    """The edition of a bucket that a worker sealed: that of ``NO_GRADIENT`` for no gradient, None without a seal."""
    if seal is None or seal.step != step:
        return None
    if bucket in seal.absent:
        return NO_GRADIENT.edition
    return next((e.edition for e in seal.editions if e.bucket == bucket), 0)


@dataclass(slots=True)
class Ledger:
    """What has arrived for one bucket in its current step, by sender and never anonymously."""

    bucket: BucketId
    readers: list[int]
    """How many transfers read each slot."""
    version: int = INITIAL_STEP
    state: ServedBucketState = ServedBucketState.COLLECTING
    arrived: dict[TaskId, Arrival] = field(default_factory=dict)

    def slot_of(self, version: int) -> int:
        return version % 2

    def advance(self, trigger: ServedBucketTrigger) -> None:
        self.state = advance(SERVED_BUCKET_TRANSITIONS, self.state, trigger)

    def give_back(self, sender: TaskId) -> list[Effect]:
        """What this sender delivered before is replaced."""
        former = self.arrived.get(sender, NO_GRADIENT)
        return [] if former is NO_GRADIENT else [GiveBack(former.number)]

    def take_out(self, sender: TaskId) -> list[Effect]:
        """What this sender delivered no longer counts, unless it is being applied."""
        if self.state is ServedBucketState.APPLYING or sender not in self.arrived:
            return []
        effects = self.give_back(sender)
        del self.arrived[sender]
        self.reopen_if_complete()
        return effects

    def is_sealed(self, sides: Iterable[WorkerSide]) -> bool:
        """Each of these has sealed the step, and what it sealed is what is here."""
        return all(
            self.arrived[side.id].edition == sealed_edition(side.seal, self.version, self.bucket) for side in sides
        )

    def reopen_if_complete(self) -> None:
        if self.state is ServedBucketState.COMPLETE:
            self.advance(ServedBucketTrigger.REOPEN)


@dataclass(slots=True)
class WorkerSide:
    """What this server knows of one worker."""

    id: TaskId
    incarnation: Incarnation = 0
    linked: bool = False
    layout: Layout | None = None
    granted: bool = False
    pull: Pull | None = None
    pulled: dict[BucketId, tuple[float, int]] = field(default_factory=dict)
    """Buckets already started for this pull: when, and how often."""
    flying: dict[tuple[int, BucketId], int] = field(default_factory=dict)
    """(version, bucket) of transfers in progress, and the slot that each reads."""
    seal: Seal | None = None
    done: Step | None = None
    since: float = 0.0
    repeat_at: float = 0.0


def known_seals(sides: Mapping[TaskId, WorkerSide], members: Iterable[TaskId], step: Step) -> list[Seal]:
    """What these workers are known to have sealed in this step."""
    return [seal for member in members if (seal := sides[member].seal) is not None and seal.step == step]


def without_gradient(seals: Iterable[Seal], bucket: BucketId) -> tuple[int, ...]:
    """The parameters that have no gradient on any worker; empty where the whole bucket is absent."""
    partial = [set(seal.without) for seal in seals if bucket not in seal.absent]
    return tuple(sorted(set.intersection(*partial))) if partial else ()
