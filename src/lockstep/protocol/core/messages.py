"""What crosses the wire between two tasks: one frozen dataclass per message.

Each is idempotent: receiving it twice, or late, changes nothing the second time. The two *requests* are
``Open`` (a server asks a worker for its gradients of a step) and ``Pull`` (a worker asks a server for a version of
its parameters); the asking side repeats the request until it is satisfied, and lists in ``have`` what it holds.

The codec (``transports/control/codec.py``) maps each class by name to a message of ``contract.proto``; a field is an
int, str, bytes, bool, float, an enum of texts, a tuple of one of those, or (a tuple of) another dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.causes import NO_REASON, Reason, ReportKind
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Incarnation, JobId, Step
from lockstep.protocol.core.placement import Homes


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that must be equal on all tasks."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Member:
    """One task of a view, and its incarnation."""

    task: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MissingTask:
    """A task that has not joined: where it should be, what was found there, since when (seconds), how often tried."""

    task: str
    address: str
    finding: str
    seconds: float
    attempts: int


@dataclass(frozen=True, slots=True)
class TransportAddress:
    """What ``Transport.address`` of one transport of a task published."""

    transport: str
    address: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link, in both directions: my task, incarnation and job (0: not known yet)."""

    task: str
    incarnation: Incarnation
    job: JobId
    version: str
    transports: tuple[TransportAddress, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What a monitor reports about its task; ``exit_code`` counts once ``exited`` is set (-9: killed by signal 9)."""

    task: str
    host: str
    monitor_pid: int
    pid: int
    incarnation: Incarnation
    phase: str
    phase_seconds: float
    task_address: str
    exited: bool
    exit_code: int
    version: str
    job: JobId
    leaver: str = ""
    leaving: int = 0
    """The task received this signal (``leaving.Departure``), as far as its monitor or the task knows; 0: none."""
    printed_seconds: float = 0.0
    """How long ago the task printed a whole report; 0: it has not. Tasks that have no link to it ask for this."""
    former: Incarnation = 0
    """The incarnation before the one that its monitor has started since: it is over, whatever the next one does."""


@dataclass(frozen=True, slots=True)
class Join:
    """Any task to the coordinator: this incarnation is here, with these settings."""

    task: str
    incarnation: Incarnation
    host: str
    pid: int
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Roster:
    """Coordinator to the tasks that joined: who is still missing, or was lost and is waited for."""

    missing: tuple[MissingTask, ...]


@dataclass(frozen=True, slots=True)
class View:
    """Coordinator to all: the cluster is complete; these are its members. A later number replaces an earlier one.

    The rest is for the receiver: the step it starts with (``INITIAL_STEP``: the chief brings the initial parameters),
    the small local state that a worker had before that step (empty: as the model was built), and the checkpoint that
    the servers start with (empty: none).

    ``shards`` and ``decisions`` (one): where the shards of the plan, and the coordinator's decisions, live in this
    view; empty where servers have no second homes.

    ``replays``, for a rank that comes back: ``state`` is what it had before the step before ``start``. That step is
    committed, and the rank makes its iteration once more for what follows from it on this rank alone.
    """

    job: JobId
    number: int
    members: tuple[Member, ...]
    start: Step = INITIAL_STEP
    state: bytes = b""
    checkpoint: str = ""
    shards: tuple[Homes, ...] = ()
    decisions: tuple[Homes, ...] = ()
    replays: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Coordinator to one task, or a called task to its caller: why you cannot take part."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter of the model, as the plan needs it."""

    name: str
    elements: int
    dtype: str
    group: int


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One parameter group: the optimizer's class name and its plain settings, as JSON."""

    kind: str
    options: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Chief to each server, and each worker to each server: the parameter list and the plan's hash.

    The hashes are compared; the lists are there to name the first difference. ``untrained`` has a digest of each
    tensor of the model that no optimizer changes (frozen parameters, buffers): the servers never send those, so they
    must be equal from the start. ``start`` and ``checkpoint`` are those of the sender's ``View``.
    """

    plan_hash: str
    bucket_bytes: int
    parameters: tuple[ParameterEntry, ...]
    optimizers: tuple[OptimizerEntry, ...]
    untrained: tuple[Setting, ...] = ()
    start: Step = INITIAL_STEP
    checkpoint: str = ""


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
class Clip:
    """How the mean of a step is clipped before the optimizers get it: to this norm of all of it together (1, 2, inf),
    or, where ``norm_type`` is 0, each element to this value."""

    limit: float
    norm_type: float = 0.0

    @property
    def by_norm(self) -> bool:
        return self.norm_type > 0.0


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
class ShardNorm:
    """The norm of one shard's part of a mean."""

    shard: int
    norm: float


@dataclass(frozen=True, slots=True)
class PartialNorm:
    """Server to coordinator: the norm of my part of the mean of ``step``, as the workers' question ``number`` means it.

    ``change``: of the contributors (``Commit``) that the mean was made of; with second homes, the number of the view.
    ``parts``: with second homes, the norm of each shard: added up by shard, the norm has the same bits whoever is home.
    """

    step: Step
    number: int
    clip: Clip
    change: int
    norm: float
    parts: tuple[ShardNorm, ...] = ()


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """Coordinator to all: the norm of the whole mean of ``step``, and what every server multiplies its part by."""

    step: Step
    number: int
    norm: float
    scale: float


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


@dataclass(frozen=True, slots=True, order=True)
class CallPlace:
    """Where in its program a worker makes a call: equal on all workers, and in every incarnation of a worker.

    ``loop``: how many loops over its steps the program has begun; ``iteration``: the one it is in, or
    ``calls.OUTSIDE_LOOPS``; ``number``: how many calls it has already made there. Calls are made in this order.
    """

    loop: int
    iteration: int
    number: int


@dataclass(frozen=True, slots=True)
class CallMade:
    """Worker to coordinator: I have come to this call, and bring this value; ``held``: which you have already.

    ``operation``, ``form`` (what its values must have in common) and ``name`` must be equal on all workers; ``where``
    is a file and a line, for people.
    """

    place: CallPlace
    operation: str
    form: str
    name: str
    where: str
    data: bytes
    held: bool = False


@dataclass(frozen=True, slots=True)
class CallOpen:
    """Coordinator to a worker that is in this call: these workers (their indices, the first few) have not come."""

    place: CallPlace
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallComplete:
    """Coordinator to a worker that is in this call: what each worker brought, in the order of their indices."""

    place: CallPlace
    workers: tuple[int, ...]
    values: tuple[bytes, ...]


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
    gradient but the values themselves."""

    step: Step
    bucket: BucketId
    mean: bool
    rates: tuple[GroupRates, ...] = ()
    without: tuple[int, ...] = ()
    values: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """Second home to home: I have made this version of this bucket of what you handed on, or have it as you copied it.

    ``digest``: of it and of its optimizer's state, in the steps in which both homes compare them. ``edition``: of the
    last copy.
    """

    bucket: BucketId
    version: int
    digest: str = ""
    edition: int = 0


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
    """Server to coordinator: my shard of version ``version`` is in this file; ``problem`` is set where it is not."""

    version: int
    file: str
    nbytes: int
    digest: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """Any task to the coordinator: this incarnation of ``task`` ended, and why; ``lives``: it is alive after all."""

    task: str
    incarnation: Incarnation
    reason: Reason
    lives: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to coordinator and servers: I have finished, after ``steps`` steps."""

    steps: Step


@dataclass(frozen=True, slots=True)
class Failed:
    """Any task to the coordinator: I cannot continue. ``culprit`` is the task that failed, if not the sender."""

    culprit: str
    step: Step
    reason: Reason


@dataclass(frozen=True, slots=True)
class End:
    """Coordinator to all: the job has ended, well or with the first real error.

    ``again``: start another incarnation, and with it the job, from the newest checkpoint.
    """

    ok: bool
    culprit: str
    step: Step
    reason: Reason = NO_REASON
    again: bool = False
    departure: int = 0
    """The signal (``leaving.Departure``) of the task that ended the job; 0: none."""


@dataclass(frozen=True, slots=True)
class StateBefore:
    """What a worker takes into the step after the committed one (a rank: into the committed one); ``stuck`` as in
    ``LocalState``."""

    task: str
    data: bytes
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Coordinator to its deputy, with second homes: all that it has decided. Nothing follows from a decision before
    the deputy holds it.

    ``view``, ``shards``, ``decisions``: as in ``View``. ``joins``: of the members, where they have changed since the
    last resolution that the deputy holds; empty otherwise. ``step``: the committed one. ``ends``: the end of the job,
    once it is decided. ``norms``: those that were decided and may be asked for again. ``calls``: how many calls of all
    workers are complete; each was told before (``KeptCall``). ``start`` (of ranks): the step that the job began with.
    """

    job: JobId
    number: int
    view: int
    shards: tuple[Homes, ...]
    decisions: tuple[Homes, ...]
    joins: tuple[Join, ...]
    step: Step
    states: tuple[StateBefore, ...]
    checkpoint: str
    ends: tuple[End, ...]
    norms: tuple[TotalNorm, ...] = ()
    calls: int = 0
    start: Step = INITIAL_STEP


@dataclass(frozen=True, slots=True)
class KeptCall:
    """Coordinator to its deputy, with second homes: the call ``number`` of this job is complete.

    ``first``: who came first, and ``made``: to what, without its value. ``committed``: the step at that time. ``anew``:
    the deputy forgets those that it was told before; all that count follow.
    """

    number: int
    first: str
    made: CallMade
    answer: CallComplete
    committed: Step
    anew: bool = False


@dataclass(frozen=True, slots=True)
class ResolutionHeld:
    """Deputy to coordinator: I hold the resolution of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Any task to the coordinator: I received this signal (``leaving.Departure``) and am leaving."""

    signal: int


@dataclass(frozen=True, slots=True)
class Left:
    """Coordinator to all others: this task received this signal and is leaving. To the task itself: you may leave."""

    task: str
    signal: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either end of a link, every second. Never counts as progress."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class Report:
    """Coordinator to all: what it found out about an unusually long wait.

    ``diagnosis`` is the whole of it as JSON (``diagnose/verdict.py``). The coordinator prints it; a task that does not
    receive ``Printed`` in time prints it itself.
    """

    kind: ReportKind
    text: str
    diagnosis: bytes


@dataclass(frozen=True, slots=True)
class Printed:
    """Coordinator to all: the report of this kind about this culprit is on my terminal."""

    kind: ReportKind
    culprit: str


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
    """Travels with the mean of a bucket, from its home to its second home, and arrives only after all its bytes."""

    step: Step
    bucket: BucketId


Note = GradientNote | VersionNote | MeanNote
