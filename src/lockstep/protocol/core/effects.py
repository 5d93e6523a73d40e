"""What a machine asks for. Frozen, so that tests can compare lists."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.protocol.core.causes import NO_REASON, Reason
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, JobId, Step, TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.loop_watch import IterationLeftOut
from lockstep.protocol.core.messages import (
    Answer,
    CallComplete,
    GroupRates,
    HandOn,
    Layout,
    Member,
    Message,
    MissingTask,
    Question,
    Saved,
    Ticket,
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message; a message to this task itself is handed back as an event.

    ``overtakes``: it depends on nothing that was sent before and may still be on its way, and may arrive before it."""

    peer: TaskId
    message: Message
    overtakes: bool = False


@dataclass(frozen=True, slots=True)
class SendPull:
    """Send the home of some buckets, which may be this task itself, a ``Pull`` with the ticket of this worker's
    parameter arena for this link."""

    peer: TaskId
    version: int
    have: tuple[BucketId, ...]
    view: int = 0


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Start the transfer of a gradient bucket to its home, which may be this task itself."""

    peer: TaskId
    step: Step
    bucket: BucketId
    edition: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class SendVersion:
    """Start the transfer of a parameter bucket, from the store's slot ``slot``, into the worker's region."""

    peer: TaskId
    version: int
    bucket: BucketId
    slot: int
    ticket: Ticket
    in_place: bool = False
    """Lend the slot itself instead of copying it."""


@dataclass(frozen=True, slots=True)
class SendMean:
    """Start the transfer of the mean that was kept, to the second home of its bucket, with all else of the update."""

    peer: TaskId
    step: Step
    bucket: BucketId
    ticket: Ticket
    update: HandOn


@dataclass(frozen=True, slots=True)
class CopyBucket:
    """Send a second home this bucket as it is, before the next update, as ``BucketCopy`` messages of this edition."""

    peer: TaskId
    bucket: BucketId
    version: int
    edition: int = 0


@dataclass(frozen=True, slots=True)
class TakeBucket:
    """This bucket and its optimizer's state are what its home has copied; ``BucketTaken`` follows."""

    bucket: BucketId
    version: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the plan for this layout and allocate its memory; ``Prepared`` follows."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class GrantRegion:
    """Give this worker a region for its gradients and send it the ``Grant``."""

    peer: TaskId


@dataclass(frozen=True, slots=True)
class Apply:
    """Reduce the gradients of ``contributors`` in this order and write the next version from slot to slot.

    ``arrivals`` are the numbers of their gradients; the sum is divided by ``replicas``. Where ``values`` is set, as at
    ``INITIAL_STEP``, the one gradient is the value itself. ``without`` are the parameters without a gradient on any
    contributor: the optimizer leaves them alone.
    """

    step: Step
    bucket: BucketId
    contributors: tuple[TaskId, ...]
    arrivals: tuple[int, ...]
    replicas: int
    rates: tuple[GroupRates, ...]
    from_slot: int
    to_slot: int
    without: tuple[int, ...] = ()
    values: bool = False
    scale: float = 1.0
    """The mean is multiplied by this: it is clipped by its norm. 1: it is not."""
    limit: float = math.inf
    """The mean is clipped to this value, element by element."""
    hands_on: bool = False
    """The mean, as it is applied, is kept where it can be handed on; ``MeanMade`` comes before ``BucketApplied``."""
    digests: bool = False
    """``BucketApplied`` carries a digest of what was made, for both homes to compare."""
    in_background: bool = False
    """At a second home: no worker waits for it, so updates of its own buckets go first."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Find the norm of the mean of these gradients, which are kept; ``BucketMeasured`` follows."""

    step: Step
    bucket: BucketId
    arrivals: tuple[int, ...]
    replicas: int
    norm_type: float
    attempt: int


@dataclass(frozen=True, slots=True)
class NormKnown:
    """The norm of the mean of ``step`` that this worker's training loop asked for, with its question ``number``."""

    step: Step
    number: int
    norm: float


@dataclass(frozen=True, slots=True)
class Serve:
    """Have the store answer this worker's question, and send the ``Answer``; or ``tells``: report it (``Served``)."""

    peer: TaskId
    question: Question
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question from this worker's training loop."""

    peer: TaskId
    answer: Answer


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """All workers have come to the call that the program of this worker is in."""

    answer: CallComplete


@dataclass(frozen=True, slots=True)
class GiveBack:
    """This arrival, of a gradient or of a version, is not wanted (a duplicate, stale, or replaced by a later edition):
    its memory may be reused."""

    arrival: int


@dataclass(frozen=True, slots=True)
class VersionReady:
    """Version ``version`` of ``bucket`` is here: in this worker's arena, or in the memory numbered ``arrival``."""

    bucket: BucketId
    version: int
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class BecameMember:
    """The cluster is complete and this task belongs to it. ``start``, ``state``, ``checkpoint``, ``replays``: as in
    ``View``; ``late``: the job ran already."""

    job: JobId
    members: tuple[Member, ...]
    start: Step = INITIAL_STEP
    state: bytes = b""
    checkpoint: str = ""
    replays: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class WordGiven:
    """Where ranks come back: every rank has every mean of ``step``, and its optimizer may use it."""

    step: Step


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """A member has a new incarnation, or a server is lost: these are the members now.

    ``has_replica``: with second homes, whether the loss of any one server would be survived.
    """

    members: tuple[Member, ...]
    has_replica: bool = True


@dataclass(frozen=True, slots=True)
class SaveShard:
    """Keep version ``version`` of these buckets, before the next update, and write it; ``ShardSaved`` follows.

    A rank saves what its program has, and names no buckets.
    """

    version: int
    buckets: tuple[BucketId, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """All shards are on disk: make a checkpoint, with the workers' states by index; ``CheckpointWritten`` follows."""

    version: int
    shards: tuple[Saved, ...]
    states: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class StillMissing:
    """The cluster is not complete: who is missing, as the coordinator sees it."""

    missing: tuple[MissingTask, ...]


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over on this task: leave. ``culprit`` and ``reason`` are set where it ended badly.

    ``again``: start another incarnation, from the newest checkpoint.
    """

    ok: bool
    culprit: str
    step: Step
    reason: Reason = NO_REASON
    again: bool = False
    departure: Departure | None = None
    """The signal that ended it here; the exit code follows from it."""
    alone: bool = False
    """Only this task leaves; the job may continue without it."""


@dataclass(frozen=True, slots=True)
class PeerLeaves:
    """Another task received a signal and is leaving."""

    peer: TaskId
    departure: Departure


@dataclass(frozen=True, slots=True)
class Noticed:
    """To be told to people; the job goes on."""

    what: IterationLeftOut


Effect = (
    Send
    | SendPull
    | SendGradient
    | SendVersion
    | SendMean
    | CopyBucket
    | TakeBucket
    | Prepare
    | GrantRegion
    | Apply
    | Measure
    | NormKnown
    | GiveBack
    | Serve
    | Answered
    | CallAnswered
    | VersionReady
    | BecameMember
    | WordGiven
    | ViewChanged
    | SaveShard
    | WriteCheckpoint
    | StillMissing
    | Noticed
    | JobEnded
    | PeerLeaves
)
