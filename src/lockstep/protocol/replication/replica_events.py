"""Events and effects of the machines with second homes, beside those of every machine (``protocol/core``)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.events import LinkLost, LinkUp, PeerGone, Tick
from lockstep.protocol.core.ids import BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.messages import End
from lockstep.protocol.replication.replica_messages import CopyOf, ReplicaMessage, UpdateFacts, UpdateOf

# -- events --


@dataclass(frozen=True, slots=True)
class MessageHeard:
    """A message from this incarnation of ``peer``."""

    peer: TaskId
    incarnation: Incarnation
    message: ReplicaMessage


@dataclass(frozen=True, slots=True)
class VersionMade:
    """The store of a home has made version ``step + 1``, of this mean."""

    bucket: BucketId
    step: Step
    mean: int
    digest: str


@dataclass(frozen=True, slots=True)
class CopyMade:
    """The store of a second home has made version ``step + 1`` of what was handed on."""

    bucket: BucketId
    step: Step
    digest: str


@dataclass(frozen=True, slots=True)
class StepComputed:
    """A worker has computed ``step``: its gradients by bucket, and what it takes into the next step."""

    step: Step
    gradients: tuple[tuple[BucketId, int], ...]
    facts: UpdateFacts
    state: bytes


ReplicaEvent = LinkUp | LinkLost | PeerGone | Tick | MessageHeard | VersionMade | CopyMade | StepComputed

# -- effects --


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message; one to this task itself is handed back as an event."""

    peer: TaskId
    message: ReplicaMessage


@dataclass(frozen=True, slots=True)
class MakeVersion:
    """Make the next version of these gradients, in this order; ``VersionMade`` follows. ``update`` has no mean yet.

    ``digests``: the second home compares what it makes with the digest of this.
    """

    update: UpdateOf
    gradients: tuple[int, ...]
    digests: bool


@dataclass(frozen=True, slots=True)
class MakeCopy:
    """Make the next version of what was handed on; ``CopyMade`` follows, with a digest if the update has one."""

    update: UpdateOf


@dataclass(frozen=True, slots=True)
class TakeCopy:
    """This bucket is as its home has it now."""

    copy: CopyOf


@dataclass(frozen=True, slots=True)
class SendCopy:
    """Send the second home this bucket with its optimizer's state, in this view."""

    peer: TaskId
    view: int
    bucket: BucketId
    version: int


@dataclass(frozen=True, slots=True)
class SendValue:
    """Send a worker this version of a bucket, in this view."""

    peer: TaskId
    view: int
    bucket: BucketId
    version: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute ``step`` with these values, by bucket, and this local state; ``StepComputed`` follows."""

    step: Step
    values: tuple[tuple[BucketId, int], ...]
    state: bytes


@dataclass(frozen=True, slots=True)
class TaskEnds:
    """This task ends: with the job's end, or (``end`` is None) alone, because it can neither go on nor know more."""

    reason: Reason
    end: End | None = None


ReplicaEffect = Say | MakeVersion | MakeCopy | TakeCopy | SendCopy | SendValue | Compute | TaskEnds
