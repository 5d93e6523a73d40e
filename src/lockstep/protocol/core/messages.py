"""What crosses the wire between two tasks: one frozen dataclass per message.

Each is idempotent: receiving it twice, or late, changes nothing the second time. The two *requests* are
``Open`` (a server asks a worker for its gradients of a step) and ``Pull`` (a worker asks a server for a version of
its parameters); the asking side repeats the request until it is satisfied, and lists in ``have`` what it holds.

The codec (``transports/control/codec.py``) maps each class by name to a message of ``contract.proto``; a field is an
int, str, bytes, bool, float, an enum of texts, a tuple of one of those, or (a tuple of) another dataclass.

Here are those of a step and of second homes; the others are in one module per subject (``*_messages.py``) and are
imported from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.call_messages import CallComplete as CallComplete
from lockstep.protocol.core.call_messages import CallMade as CallMade
from lockstep.protocol.core.call_messages import CallOpen as CallOpen
from lockstep.protocol.core.call_messages import CallPlace as CallPlace
from lockstep.protocol.core.decision_messages import KeptCall as KeptCall
from lockstep.protocol.core.decision_messages import Resolution as Resolution
from lockstep.protocol.core.decision_messages import ResolutionHeld as ResolutionHeld
from lockstep.protocol.core.decision_messages import StateBefore as StateBefore
from lockstep.protocol.core.end_messages import Done as Done
from lockstep.protocol.core.end_messages import End as End
from lockstep.protocol.core.end_messages import Failed as Failed
from lockstep.protocol.core.end_messages import Lost as Lost
from lockstep.protocol.core.end_messages import Printed as Printed
from lockstep.protocol.core.end_messages import Report as Report
from lockstep.protocol.core.ids import BucketId, Incarnation, JobId, Step
from lockstep.protocol.core.joining_messages import Description as Description
from lockstep.protocol.core.joining_messages import Heartbeat as Heartbeat
from lockstep.protocol.core.joining_messages import Hello as Hello
from lockstep.protocol.core.joining_messages import Join as Join
from lockstep.protocol.core.joining_messages import Leaving as Leaving
from lockstep.protocol.core.joining_messages import Left as Left
from lockstep.protocol.core.joining_messages import Member as Member
from lockstep.protocol.core.joining_messages import MissingTask as MissingTask
from lockstep.protocol.core.joining_messages import Refused as Refused
from lockstep.protocol.core.joining_messages import Roster as Roster
from lockstep.protocol.core.joining_messages import Setting as Setting
from lockstep.protocol.core.joining_messages import TransportAddress as TransportAddress
from lockstep.protocol.core.joining_messages import View as View
from lockstep.protocol.core.layout_messages import Layout as Layout
from lockstep.protocol.core.layout_messages import OptimizerEntry as OptimizerEntry
from lockstep.protocol.core.layout_messages import ParameterEntry as ParameterEntry
from lockstep.protocol.core.norm_messages import Clip as Clip
from lockstep.protocol.core.norm_messages import PartialNorm as PartialNorm
from lockstep.protocol.core.norm_messages import ShardNorm as ShardNorm
from lockstep.protocol.core.norm_messages import TotalNorm as TotalNorm


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a peer must know to reach a region: plain numbers, a short name and a short key."""

    transport: str
    region: int
    nbytes: int
    address: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """Server to worker: you may write your gradients here (one region for this pair of incarnations)."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Open:
    """Server to worker: step ``step`` is open, send me your gradients; I have those of ``have`` already.

    ``view``: the one in which the server's buckets are those that it speaks of (with second homes).
    """

    step: Step
    have: tuple[BucketId, ...]
    view: int = 0


@dataclass(frozen=True, slots=True)
class Pull:
    """Worker to server: send me version ``version`` of your buckets; I have those of ``have`` already."""

    version: int
    have: tuple[BucketId, ...]
    ticket: Ticket
    in_place: bool = False
    """Lend the buckets: this worker computes with them in place, and gives them back once it has the next version."""
    view: int = 0
    """With second homes: the view that this worker knows, so which buckets it takes from this server."""


@dataclass(frozen=True, slots=True)
class GroupRates:
    """Numbers of one parameter group that may change from step to step (learning rate, momentum, ...)."""

    names: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Chief to each server: apply step ``step`` with these numbers."""

    step: Step
    groups: tuple[GroupRates, ...]


@dataclass(frozen=True, slots=True)
class Edition:
    """A bucket was edited and sent again ``edition`` times; only this edition counts."""

    bucket: BucketId
    edition: int


@dataclass(frozen=True, slots=True)
class LoopCount:
    """At which iteration of a loop of its own a worker's program is; ``name`` tells the loop from its others."""

    name: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Worker to server: my gradients of ``step`` are final; the buckets of ``absent`` have none.

    Buckets that are not in ``editions`` count in their first edition, 0; that of an absent bucket was taken back.
    ``without`` are parameters (numbers of the plan) that have no gradient although their bucket has one; there it is
    zero. ``void``: no worker's gradients of this step may be applied (this worker found infinity in its own).
    ``values``: the chief's buckets are not gradients but the next parameters themselves. ``occasion`` names what the
    worker was doing; it must be the same on all workers.

    ``clip``: the mean is clipped (one at most). ``asks``: the gradients are not final, the worker only wants to know
    the norm of their mean now; a final seal, or another question, follows. ``number`` counts the questions of the step.
    ``loops``: where the program is, to be compared with the others (``loop_watch.py``).
    """

    step: Step
    absent: tuple[BucketId, ...]
    editions: tuple[Edition, ...]
    without: tuple[int, ...] = ()
    void: bool = False
    values: bool = False
    occasion: str = ""
    clip: tuple[Clip, ...] = ()
    asks: bool = False
    number: int = 0
    loops: tuple[LoopCount, ...] = ()

    @property
    def order(self) -> tuple[int, bool]:
        """A worker's seals of one step in the order in which it made them; messages may overtake each other."""
        return self.number, not self.asks

    @property
    def norm_clip(self) -> Clip | None:
        """How the mean is clipped, if that takes its norm."""
        return next((clip for clip in self.clip if clip.by_norm), None)


@dataclass(frozen=True, slots=True)
class Contributors:
    """Coordinator to servers: step ``step`` is made of the gradients of these workers (their indices) and no others."""

    step: Step
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """Worker to server, outside of the steps: ``what`` is a request that the server's store knows, with its bytes.

    ``bucket``: the one that it is about. ``changes``: the store has another state of it afterwards. ``view``: with
    second homes, that in which this server is its home.
    """

    number: int
    what: str
    data: bytes
    bucket: BucketId = 0
    changes: bool = False
    view: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Server to worker: the answer to its question ``number``; ``problem`` is set where there is none."""

    number: int
    data: bytes
    problem: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Server to coordinator: all my buckets are at version ``step + 1``; with second homes: all that are mine in this
    view, and these hold them. Where ranks come back: this rank has every mean of ``step``, in this view."""

    step: Step
    view: int = 0


@dataclass(frozen=True, slots=True)
class HandOn:
    """Home to second home: all that made version ``step + 1`` of ``bucket`` out of version ``step``, except the mean
    itself, which travels as a tensor (``mean``: there is one). The mean is clipped already. ``values``: it is not a
    gradient but the values themselves.

    Where there is a mean, this travels with it (``MeanNote``), and is a message only if the second home is asked again
    whether it has it."""

    step: Step
    bucket: BucketId
    mean: bool
    rates: tuple[GroupRates, ...] = ()
    without: tuple[int, ...] = ()
    values: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """Second home to home: I have all that this version of this bucket is made of, or have it as you copied it.

    ``digest``: of it and of its optimizer's state, in the steps in which both homes compare them; there it is made.
    ``edition``: of the last copy. ``reads``: a mean that was handed on is still being read, perhaps in your memory.
    """

    bucket: BucketId
    version: int
    digest: str = ""
    edition: int = 0
    reads: bool = False


@dataclass(frozen=True, slots=True)
class BucketCopy:
    """Home to a second home: a part, from ``offset``, of a bucket as it is, with its optimizer's state.

    To one that is new; and if a program has loaded another state: ``edition`` counts how often.
    """

    bucket: BucketId
    version: int
    offset: int
    total: int
    data: bytes
    edition: int = 0


@dataclass(frozen=True, slots=True)
class SecondWhole:
    """Home to coordinator: in this view, the second home of this shard has all that I have, and I wait for it now."""

    shard: int
    view: int


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinator to a task that is no member: server number ``home`` coordinates this job, since view ``view``."""

    home: int
    view: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Coordinator to servers: step ``step`` is complete on every server.

    ``save``: version ``step + 1`` goes into a checkpoint, before anything is applied to it. ``workers``: the following
    steps are made of the gradients of these (empty: of all workers); the greatest ``change`` counts.
    """

    step: Step
    save: bool = False
    change: int = 0
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalState:
    """Worker to coordinator: my state besides the parameters before ``step``; ``same``: as one step earlier.

    ``stuck``: why another incarnation of this worker could not start with that step; empty if it could.
    """

    step: Step
    data: bytes
    same: bool = False
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """Server to coordinator: my shard of version ``version`` is in this file; ``problem`` is set where it is not. With
    second homes: all buckets that are mine in this view."""

    version: int
    file: str
    nbytes: int
    digest: str
    problem: str = ""
    view: int = 0


Message = (
    Hello
    | Description
    | Join
    | Roster
    | LocalState
    | Saved
    | Lost
    | View
    | Refused
    | Layout
    | Grant
    | Open
    | Pull
    | Rates
    | Seal
    | Applied
    | Commit
    | Done
    | Failed
    | End
    | Leaving
    | Left
    | Heartbeat
    | Report
    | Printed
    | Contributors
    | Question
    | Answer
    | CallMade
    | CallOpen
    | CallComplete
    | PartialNorm
    | TotalNorm
    | HandOn
    | Holding
    | Resolution
    | ResolutionHeld
    | KeptCall
    | BucketCopy
    | SecondWhole
    | Coordinates
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender, the sender's incarnation, and the job (0: not known yet)."""

    job: JobId
    sender: str
    incarnation: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class GradientNote:
    """Travels with a gradient bucket and arrives only after all its bytes."""

    step: Step
    bucket: BucketId
    edition: int = 0


@dataclass(frozen=True, slots=True)
class VersionNote:
    """Travels with a parameter bucket and arrives only after all its bytes."""

    version: int
    bucket: BucketId


@dataclass(frozen=True, slots=True)
class MeanNote:
    """Travels with the mean of a bucket, from its home to its second home, and arrives only after all its bytes.

    ``update``: what else the version is made of; None if that is too long for a note, and comes as a message."""

    step: Step
    bucket: BucketId
    update: HandOn | None = None


Note = GradientNote | VersionNote | MeanNote
