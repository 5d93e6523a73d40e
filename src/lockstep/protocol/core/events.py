"""What a machine receives. Time is not part of it: it is the second argument of ``handle``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import (
    Answer,
    CallMade,
    Clip,
    GroupRates,
    HandOn,
    Layout,
    LoopCount,
    Message,
    MissingTask,
    Question,
    Saved,
)
from lockstep.protocol.core.plan import Plan


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Messages and transfers can flow to and from this incarnation of ``peer``; this is the first event of its link."""

    peer: TaskId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to ``peer`` broke. What was in flight on it is void.

    From now on the link neither reads nor writes this task's memory and reports nothing, not even the end of a
    transfer; the next event of this peer is a ``LinkUp``.
    """

    peer: TaskId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """This incarnation of ``peer`` has provably ended (its monitor reports it, or nothing answers any more).

    ``incarnation`` 0: whichever it has now.
    """

    peer: TaskId
    reason: Reason
    incarnation: Incarnation = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A message from this incarnation of ``peer``."""

    peer: TaskId
    incarnation: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """All bytes of a gradient bucket have arrived; the task keeps them under the number ``arrival``."""

    peer: TaskId
    incarnation: Incarnation
    step: Step
    bucket: BucketId
    edition: int
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """All bytes of a parameter bucket have arrived: in this worker's arena, or lent (``arrival`` is not 0) in memory
    that the task keeps under that number."""

    peer: TaskId
    version: int
    bucket: BucketId
    arrival: int = 0


class TensorKind(StrEnum):
    """The kinds of tensors that travel; a task with both roles sends both, also to the same peer."""

    GRADIENT = "gradient"
    VERSION = "version"
    MEAN = "mean"
    """From home to second home."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The sender's side of a transfer is done: its source may be overwritten. This does not mean arrival."""

    peer: TaskId
    number: int
    bucket: BucketId
    kind: TensorKind
    ok: bool


@dataclass(frozen=True, slots=True)
class MeanMade:
    """The mean of ``bucket`` in ``step`` is in the memory that it is handed on from; the version follows."""

    bucket: BucketId
    step: Step


@dataclass(frozen=True, slots=True)
class MeanArrived:
    """The home of ``bucket`` has handed on a mean; the task keeps its bytes under the number ``arrival``.

    ``update``: what came with it."""

    peer: TaskId
    incarnation: Incarnation
    step: Step
    bucket: BucketId
    arrival: int
    update: HandOn | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """This task has its plan and the memory for it; on a worker, ``layout`` is how it announces its model."""

    plan: Plan
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class StepBegun:
    """The training loop of this worker starts ``step``; ``rates`` are set on the chief only."""

    step: Step
    rates: tuple[GroupRates, ...]


@dataclass(frozen=True, slots=True)
class Produced:
    """Backward has filled ``bucket`` of ``step`` (or filled it again)."""

    step: Step
    bucket: BucketId


@dataclass(frozen=True, slots=True)
class Sealed:
    """The gradients of ``step`` are final; the buckets of ``absent`` got none. The rest is as in ``messages.Seal``.

    ``state`` is what this worker takes into the next step besides the parameters; None: it is sent later.
    """

    step: Step
    absent: tuple[BucketId, ...]
    rates: tuple[GroupRates, ...]
    without: tuple[int, ...] = ()
    void: bool = False
    values: bool = False
    occasion: str = ""
    state: bytes | None = b""
    clip: tuple[Clip, ...] = ()
    asks: bool = False
    loops: tuple[LoopCount, ...] = ()


@dataclass(frozen=True, slots=True)
class StateTaken:
    """What this worker takes into ``step`` besides the parameters; ``stuck`` as in ``messages.LocalState``."""

    step: Step
    data: bytes
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class ShardSaved:
    """This server's shard of version ``saved.version`` is on disk, or could not be written."""

    saved: Saved


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The checkpoint of ``version`` is complete on disk, or could not be made (``problem``)."""

    version: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """The training loop of this worker asks a question: the home of its bucket, or this ``peer``."""

    question: Question
    peer: TaskId | None = None


@dataclass(frozen=True, slots=True)
class Calling:
    """The program of this worker has come to a call that all workers make."""

    made: CallMade


@dataclass(frozen=True, slots=True)
class Finished:
    """The training loop of this worker has ended after ``steps`` steps."""

    steps: Step


@dataclass(frozen=True, slots=True)
class BucketApplied:
    """The store has made version ``step + 1`` of ``bucket``."""

    bucket: BucketId
    step: Step
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """The store has answered this worker's question, and what it has of the bucket may be different now."""

    peer: TaskId
    question: Question
    answer: Answer


@dataclass(frozen=True, slots=True)
class BucketTaken:
    """The store has this version of ``bucket`` as its home copied it."""

    bucket: BucketId
    version: int


@dataclass(frozen=True, slots=True)
class BucketMeasured:
    """The store knows the norm of the mean of ``bucket``, as the ``attempt`` of this number asked for it."""

    bucket: BucketId
    attempt: int
    norm: float


@dataclass(frozen=True, slots=True)
class Broken:
    """This task cannot continue, and why; ``culprit`` is the task that failed."""

    culprit: TaskId
    step: Step
    reason: Reason


@dataclass(frozen=True, slots=True)
class Searched:
    """What was found at the addresses of the tasks that have not joined; the coordinator passes it on."""

    findings: tuple[MissingTask, ...]


@dataclass(frozen=True, slots=True)
class SignalCame:
    """This task received a signal that asks it to leave."""

    departure: Departure


@dataclass(frozen=True, slots=True)
class Reduced:
    """Without servers: ``bucket`` of ``step`` has been summed over all workers."""

    step: Step
    bucket: BucketId


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline of this machine has come."""


Event = (
    LinkUp
    | LinkLost
    | PeerGone
    | Received
    | GradientArrived
    | VersionArrived
    | MeanMade
    | MeanArrived
    | TransferEnded
    | Prepared
    | StepBegun
    | Produced
    | Sealed
    | StateTaken
    | Asked
    | Calling
    | ShardSaved
    | CheckpointWritten
    | Finished
    | BucketApplied
    | BucketTaken
    | Served
    | BucketMeasured
    | Broken
    | Searched
    | SignalCame
    | Reduced
    | Tick
)
