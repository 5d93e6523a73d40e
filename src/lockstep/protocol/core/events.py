"""What a machine receives. Time is not in here: it is the second argument of ``handle``."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import GroupRates, Layout, Message, MissingTask, Question, Saved
from lockstep.protocol.core.plan import Plan


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Messages and transfers can flow to and from this incarnation of ``peer``; none of this link came before."""

    peer: TaskId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to ``peer`` broke. What was in flight on it is void.

    From now on nothing of it is read from this task's memory, lands there, or is handed over, not even that a transfer
    has ended; the next event of this peer is a ``LinkUp``.
    """

    peer: TaskId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """It is proven that this incarnation of ``peer`` has ended (its monitor reports it, or nothing answers any more).

    ``incarnation`` 0: whichever it has now.
    """

    peer: TaskId
    reason: Reason
    incarnation: Incarnation = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A message of this incarnation of ``peer``."""

    peer: TaskId
    incarnation: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """All bytes of a gradient bucket are here; ``arrival`` is the number under which the task keeps them."""

    peer: TaskId
    incarnation: Incarnation
    step: Step
    bucket: BucketId
    edition: int
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """All bytes of a parameter bucket are here."""

    peer: TaskId
    version: int
    bucket: BucketId


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The sender's end of a transfer is over: its source may be overwritten. It does not mean arrival."""

    peer: TaskId
    number: int
    bucket: BucketId
    ok: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """This task has its plan and the memory for it; on a worker, ``layout`` is what it announces of its model."""

    plan: Plan
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class StepBegun:
    """The training loop of this worker begins ``step``; ``rates`` are set on the chief only."""

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

    ``state`` is what this worker takes into the next step beside the parameters; None: that is sent later.
    """

    step: Step
    absent: tuple[BucketId, ...]
    rates: tuple[GroupRates, ...]
    without: tuple[int, ...] = ()
    void: bool = False
    values: bool = False
    occasion: str = ""
    state: bytes | None = b""


@dataclass(frozen=True, slots=True)
class StateTaken:
    """What this worker takes into ``step`` beside the parameters; ``stuck`` as in ``messages.LocalState``."""

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
    """The training loop of this worker asks a server a question."""

    peer: TaskId
    question: Question


@dataclass(frozen=True, slots=True)
class Finished:
    """The training loop of this worker has ended after ``steps`` steps."""

    steps: Step


@dataclass(frozen=True, slots=True)
class BucketApplied:
    """The store has made version ``step + 1`` of ``bucket``."""

    bucket: BucketId
    step: Step


@dataclass(frozen=True, slots=True)
class Broken:
    """This task cannot go on, and why; ``culprit`` is the task that broke."""

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
class PeerLeaving:
    """Workers without servers: another one received a signal that asks it to leave."""

    peer: TaskId
    departure: Departure


@dataclass(frozen=True, slots=True)
class Awaited:
    """Workers without servers: these of the others are not there yet."""

    missing: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class Met:
    """Workers without servers: all are there; ``lives`` are their incarnations in the order of their index."""

    lives: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Workers without servers: ``bucket`` of ``step`` is summed over all of them."""

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
    | TransferEnded
    | Prepared
    | StepBegun
    | Produced
    | Sealed
    | StateTaken
    | Asked
    | ShardSaved
    | CheckpointWritten
    | Finished
    | BucketApplied
    | Broken
    | Searched
    | SignalCame
    | PeerLeaving
    | Awaited
    | Met
    | Reduced
    | Tick
)
