"""A server's records: what has arrived for each bucket, by sender, and what each worker has asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import Layout, Pull, Seal


class ServedBucketState(StrEnum):
    COLLECTING = "collecting"
    COMPLETE = "complete"
    APPLYING = "applying"
    HANDED_ON = "handed on"


class ServedBucketTrigger(StrEnum):
    COMPLETE = "last gradient arrived"
    REOPEN = "a gradient is missing again"
    APPLY = "applying began"
    APPLIED = "next version made"
    HAND_ON = "made here, and not yet at the second home"
    HELD = "the second home has it too"


SERVED_BUCKET_TRANSITIONS: Mapping[tuple[ServedBucketState, ServedBucketTrigger], ServedBucketState] = MappingProxyType(
    {
        (ServedBucketState.COLLECTING, ServedBucketTrigger.COMPLETE): ServedBucketState.COMPLETE,
        (ServedBucketState.COMPLETE, ServedBucketTrigger.REOPEN): ServedBucketState.COLLECTING,
        (ServedBucketState.COMPLETE, ServedBucketTrigger.APPLY): ServedBucketState.APPLYING,
        (ServedBucketState.APPLYING, ServedBucketTrigger.APPLIED): ServedBucketState.COLLECTING,
        (ServedBucketState.APPLYING, ServedBucketTrigger.HAND_ON): ServedBucketState.HANDED_ON,
        (ServedBucketState.HANDED_ON, ServedBucketTrigger.HELD): ServedBucketState.COLLECTING,
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


def newest_edition(seal: Seal, bucket: BucketId) -> int:
    """The newest edition that its worker had made when it sealed; -1 if none. It may be one that was taken back."""
    made = next((e.edition for e in seal.editions if e.bucket == bucket), -1)
    return made if bucket in seal.absent else max(made, 0)


@dataclass(slots=True)
class Ledger:
    """What has arrived for one bucket in its current step, by sender and never anonymously."""

    bucket: BucketId
    readers: list[int]
    """How many transfers read each slot."""
    version: int = INITIAL_STEP
    state: ServedBucketState = ServedBucketState.COLLECTING
    arrived: dict[TaskId, Arrival] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Its next version is made of what has arrived, or was made and is not known yet."""
        return self.state in (ServedBucketState.APPLYING, ServedBucketState.HANDED_ON)

    def go(self, trigger: ServedBucketTrigger) -> None:
        self.state = advance(SERVED_BUCKET_TRANSITIONS, self.state, trigger)

    def reopen(self) -> None:
        """A gradient is missing again, if none was."""
        if self.state is ServedBucketState.COMPLETE:
            self.go(ServedBucketTrigger.REOPEN)

    def slot_of(self, version: int) -> int:
        return version % len(self.readers)


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
