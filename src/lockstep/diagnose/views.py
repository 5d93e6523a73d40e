"""Snapshots as typed values: what a task reports of itself, and what its monitor reports of it.

A snapshot comes from a peer or from a file, so nothing in it is trusted (``fields.py``). ``task_view.py`` and
``monitor_view.py`` read them. Ages are in seconds before the snapshot was taken: the clocks of two hosts are never
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.protocol.core.activity import Code, Doing
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.parts import Part
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.worker.holdings import HeldBucketState


@dataclass(frozen=True, slots=True)
class WaitView:
    """One wait of a task."""

    on: str
    kind: WaitKind
    key: str
    """Of the tensor; empty where it is not a tensor."""
    what: str
    """For people: the key of a tensor, or a few words."""
    step: int
    seconds: float
    state: str
    bucket: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MovingView:
    """A transfer that was started and has not ended."""

    what: str
    """Its ``TensorKind``; empty where it is not known."""
    step: int
    bucket: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkView:
    """One end of a link, as seen by its task."""

    peer: str
    state: str
    heard: float
    incarnation: str
    path: str
    sent: int
    received: int
    moved: int
    """Bytes in either direction in the last two seconds."""
    moving: tuple[MovingView, ...]
    callback: str
    callback_seconds: float
    callback_stack: tuple[str, ...]
    finding: str
    refusal: Cause | None = None
    """Why the peer refuses this task, where it does."""
    answer: Reach = Reach.NOT_ASKED
    """What this task found at the peer's address when it last looked."""
    last_end: str = ""
    """How the process that was last seen there ended; empty if none has ended, or another has started."""
    by_rdma: bool = False
    watched: float = 0.0
    """Seconds for which the kernel's counters below were watched; 0: not known."""
    waiting: int = 0
    """Bytes that this end's kernel holds because the other has not acknowledged them."""
    segments_in: int = 0
    """TCP segments that arrived from the peer's host meanwhile, old or new."""
    quiet: float = 0.0
    """The longest time meanwhile in which none came."""
    retransmits: int = 0
    """How often the kernel has sent one segment again without progress, on the worst connection with that host."""
    resent: int = 0
    """How often it did so while the counters were watched."""
    stuck: int = 0
    """Bytes that wait on that connection."""
    path_mtu: int = 0

    @property
    def up(self) -> bool:
        return self.state == "up"


@dataclass(frozen=True, slots=True)
class MainView:
    """The training thread: what it reports, and what the kernel reports."""

    doing: Doing
    detail: str
    seconds: float
    cpu: float
    """Share of a CPU in the last two seconds; -1: not known."""
    where: Code
    stack: tuple[str, ...]
    place: str = ""
    """The innermost line of the program's own code: ``function (file:line)``."""
    dwells: str = ""
    """What its stacks have had in common for ``dwelt`` seconds: ``function (file:first-last line)``."""
    dwelt: float = 0.0
    innermost: bool = False
    """All of these stacks ended in the program's own code, and not in a library that computes for it."""
    input: InputView | None = None
    """How far its input is, while it waits for that."""


@dataclass(frozen=True, slots=True)
class InputView:
    """How far the data is that a training thread waits for."""

    read: int
    """Records read since it began to wait."""
    read_ago: float
    step_seconds: float
    """Seconds since the batch before: the wait is part of them."""
    stopped: tuple[int, ...]
    """Processes that should read and are stopped."""
    readers: tuple[tuple[int, str], ...] = ()
    """All that should read, with the kernel's word for what each does."""


@dataclass(frozen=True, slots=True)
class ShardView:
    """The part of a checkpoint that a server is writing."""

    file: str
    seconds: float
    written_ago: float


@dataclass(frozen=True, slots=True)
class TensorView:
    """What one task saw of one tensor: the age of each state, and how often it occurred."""

    kind: str
    number: int
    bucket: int
    peer: str
    ages: Mapping[str, float]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ServerSideView:
    """What a worker knows of one server."""

    open_step: int
    awaited: int
    linked: bool


@dataclass(frozen=True, slots=True)
class WorkerSideView:
    """What a server (without servers: a worker's share) knows of one worker."""

    linked: bool
    granted: bool
    pulls: int
    done: int


@dataclass(frozen=True, slots=True)
class SpanView:
    """Part of the last steps; ``begin`` and ``end`` are ages."""

    part: Part | None
    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class BucketView:
    """A bucket in the books of a worker or a server."""

    state: HeldBucketState | None
    """Of a worker's bucket; a server's has other states, which no rule needs."""
    version: int
    busy: bool
    arrived: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreView:
    """The thread of a server that reduces and updates."""

    doing: str
    busy: float
    queued: int
    cpu: float
    where: Code
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the job ended, according to the coordinator."""

    culprit: str
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class RefusedView:
    """The callers that a process has refused, and the last of them."""

    callers: int
    entrance: str
    caller: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """What a task reports of itself."""

    task: str
    incarnation: str = ""
    job: str = ""
    version: str = ""
    host: str = ""
    pid: int = 0
    phase: str = ""
    step: int = -2
    outcome: str = ""
    ended: Ended | None = None
    """Why the job is over; None while it runs, and where it ended well or goes on."""
    usual: float = 0.0
    step_median: float = 0.0
    steps_done: int = 0
    batch: int = 0
    """Examples of one step on all workers; 0: the program does not tell."""
    loss: float | None = None
    loss_step: int = -1
    main: MainView | None = None
    waits: tuple[WaitView, ...] = ()
    links: Mapping[str, LinkView] = field(default_factory=dict)
    tensors: tuple[TensorView, ...] = ()
    wants_version: int = -2
    sealed: int = -2
    """The last step that its training thread has ended: buckets of it may still be copied."""
    servers: Mapping[str, ServerSideView] = field(default_factory=dict)
    workers: Mapping[str, WorkerSideView] = field(default_factory=dict)
    buckets: Mapping[int, BucketView] = field(default_factory=dict)
    served: Mapping[int, BucketView] = field(default_factory=dict)
    """The buckets that it makes new versions of: a server's, or the share of a worker where there is no server."""
    served_step: int = -2
    """The step that those are open for."""
    committed: int = -2
    lacks_replica: bool = False
    """It coordinates servers with second homes, and not everything has one now."""
    handed: tuple[int, int] | None = None
    """The last step and bucket that a worker without servers handed over."""
    call: tuple[int, ...] | None = None
    """The place of the call that its program waits in."""
    called: tuple[int, ...] | None = None
    """The place of the last call to which it has come, if any."""
    still: float = 0.0
    """Seconds without progress."""
    loop_busy: float = 0.0
    loop_what: str = ""
    loop_queued: int = 0
    loop_stack: tuple[str, ...] = ()
    store: StoreView | None = None
    disk_free: int = -1
    disk_folder: str = ""
    written_ago: float = -1.0
    shard: ShardView | None = None
    available_memory: int = -1
    parts: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of the parts of a step (compute, wait, apply), where they are known."""
    cluster: Mapping[str, str] = field(default_factory=dict)
    spans: tuple[SpanView, ...] = ()
    """What happened in the last steps."""
    refused: RefusedView | None = None

    def tensor(self, kind: str, number: int, bucket: int, peer: str) -> TensorView | None:
        for tensor in self.tensors:
            if (tensor.kind, tensor.number, tensor.bucket, tensor.peer) == (kind, number, bucket, peer):
                return tensor
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorView:
    """What the monitor of a task reports of it."""

    task: str
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    job: str = ""
    version: str = ""
    phase: str = ""
    phase_seconds: float = 0.0
    task_address: str = ""
    exited: bool = False
    exit_code: int = 0
    state: str = ""
    stopped: float = -1.0
    """Seconds for which it has been stopped; -1: it is not."""
    out_of_memory: str | None = None
    """Evidence that the kernel killed it for lack of memory, where there is some."""
    reason: str = ""
    """Why the task gave up, in its own words; empty while it has not."""
    silent: float = -1.0
    """Seconds since the task's last heartbeat to its monitor; -1: not known."""
    on_device: bool = False
    """Whether the process has opened a GPU."""
    stack: tuple[str, ...] = ()
    resident: int = 0
    cluster: Mapping[str, str] = field(default_factory=dict)
    """Every task of the cluster with its address."""
    refused: RefusedView | None = None
