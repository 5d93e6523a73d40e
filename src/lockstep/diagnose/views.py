"""Snapshots as typed values: what a task reports of itself, and what its monitor reports of it.

A snapshot comes from a peer or from a file, so nothing in it is trusted: a field of the wrong type becomes its neutral
value, and bytes that are not a snapshot become a plain sentence (``SnapshotError``). Ages are in seconds before
the snapshot was taken: the clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from lockstep.diagnose import phrases
from lockstep.foreign import JsonError, plain, read_json
from lockstep.protocol.core.activity import Code, Doing
from lockstep.protocol.core.causes import Cause, Reason, Source
from lockstep.protocol.core.parts import Part
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.worker.holdings import HeldBucketState

_Kind = TypeVar("_Kind", bound=StrEnum)
_Default = TypeVar("_Default")

FORMAT = 2
MAX_BYTES = 16 << 20
_MAX_ITEMS = 100_000
_MOST = 1 << 64
"""No number of a task is larger; one that is counts as not said."""


class SnapshotError(ValueError):
    """These bytes are not a snapshot; the text is one plain sentence."""


def _text(value: object, default: str = "") -> str:
    return plain(value) if isinstance(value, str) else default


def _number(value: object, default: float = 0.0) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST:
        return float(value)
    return default


def _whole(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST else default


def _member(kind: type[_Kind], value: object, default: _Default) -> _Kind | _Default:
    """The member of an enum with this value; one that this version does not know must not spoil the rest."""
    try:
        return kind(value) if isinstance(value, str) else default
    except ValueError:
        return default


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value[:_MAX_ITEMS] if isinstance(one, dict)] if isinstance(value, list) else []


def _lines(value: object) -> tuple[str, ...]:
    return tuple(plain(str(line), 500) for line in value[:200]) if isinstance(value, list) else ()


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
    """What a server knows of one worker."""

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
    main: MainView | None = None
    waits: tuple[WaitView, ...] = ()
    links: Mapping[str, LinkView] = field(default_factory=dict)
    tensors: tuple[TensorView, ...] = ()
    wants_version: int = -2
    servers: Mapping[str, ServerSideView] = field(default_factory=dict)
    workers: Mapping[str, WorkerSideView] = field(default_factory=dict)
    buckets: Mapping[int, BucketView] = field(default_factory=dict)
    committed: int = -2
    handed: tuple[int, int] | None = None
    """The last step and bucket that a worker without servers handed over."""
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


def addresses_in(fields: Mapping[str, Any]) -> dict[str, str]:
    """The cluster as listed in a snapshot: tasks and their addresses."""
    named = _object(fields.get("cluster"))
    items = list(named.items())[:_MAX_ITEMS]
    return {plain(task): plain(address) for task, address in items if isinstance(address, str)}


def _load(data: bytes, kind: str) -> Mapping[str, Any]:
    if len(data) > MAX_BYTES:
        raise SnapshotError(phrases.snapshot_too_long(MAX_BYTES, len(data)))
    try:
        fields = read_json(data, MAX_BYTES)
    except JsonError as error:
        raise SnapshotError(phrases.snapshot_not_json()) from error
    if not isinstance(fields, dict) or fields.get("kind") != kind:
        raise SnapshotError(phrases.no_snapshot_of(kind))
    if fields.get("format") != FORMAT:
        raise SnapshotError(phrases.snapshot_of_another_version(fields.get("format"), FORMAT))
    return fields


def read_task(data: bytes) -> TaskView:
    """A task's snapshot; SnapshotError for anything else."""
    fields = _load(data, "task")
    books, steps = _object(fields.get("machines")), _object(fields.get("steps"))
    role, loop = _object(books.get("role")), _object(fields.get("loop"))
    progress, disk = _object(fields.get("progress")), _object(fields.get("disk"))
    return TaskView(
        task=_text(fields.get("task")),
        incarnation=_text(fields.get("incarnation")),
        job=_text(fields.get("job")),
        version=_text(fields.get("version")),
        host=_text(fields.get("host")),
        pid=_whole(fields.get("pid")),
        phase=_text(fields.get("phase")),
        step=_whole(fields.get("step"), -2),
        outcome=_text(fields.get("outcome")),
        ended=_ended(fields.get("ended")),
        usual=_number(steps.get("usual")),
        step_median=_number(steps.get("median")),
        steps_done=_whole(steps.get("done")),
        main=_main(fields.get("main")),
        waits=tuple(_wait(one) for one in _objects(fields.get("waits"))),
        links={link.peer: link for link in map(_link, _objects(fields.get("links")))},
        tensors=tuple(_tensor(one) for one in _objects(fields.get("tensors"))),
        wants_version=_whole(role.get("wants_version"), -2),
        servers={_text(one.get("task")): _server_side(one) for one in _objects(role.get("servers"))},
        workers={_text(one.get("task")): _worker_side(one) for one in _objects(role.get("workers"))},
        buckets={_whole(one.get("id"), -1): _bucket(one) for one in _objects(role.get("buckets"))},
        committed=_whole(role.get("committed"), -2),
        handed=_pair(role.get("handed")),
        still=_number(progress.get("seconds")),
        loop_busy=_number(loop.get("busy")),
        loop_what=_text(loop.get("what")),
        loop_queued=_whole(loop.get("queued")),
        loop_stack=_lines(loop.get("stack")),
        store=_store(fields.get("store")),
        disk_free=_whole(disk.get("free"), -1),
        disk_folder=_text(disk.get("folder")),
        written_ago=_number(disk.get("written_ago"), -1.0),
        shard=_shard(fields.get("shard")),
        available_memory=_whole(_object(fields.get("memory")).get("available"), -1),
        parts={plain(name): _number(value) for name, value in _object(fields.get("parts")).items()},
        cluster=addresses_in(fields),
        spans=tuple(_span(one) for one in _objects(fields.get("spans"))),
    )


def _ended(value: object) -> Ended | None:
    one = _object(value)
    if not one:
        return None
    cause = _member(Cause, one.get("cause"), Cause.UNKNOWN)
    reason = Reason(cause, _text(one.get("text")), _member(Source, one.get("source"), Source.RULE))
    return Ended(_text(one.get("culprit")), _whole(one.get("step"), -2), reason)


def _pair(value: object) -> tuple[int, int] | None:
    return (_whole(value[0], -1), _whole(value[1], -1)) if isinstance(value, list) and len(value) == 2 else None


def _span(one: Mapping[str, Any]) -> SpanView:
    part = _member(Part, one.get("part"), None)
    return SpanView(part, _text(one.get("what")), _number(one.get("begin")), _number(one.get("end")))


def _main(value: object) -> MainView | None:
    one = _object(value)
    if not one:
        return None
    dwells = _object(one.get("dwells"))
    return MainView(
        _member(Doing, one.get("doing"), Doing.NOTHING),
        _text(one.get("detail")),
        _number(one.get("seconds")),
        _number(one.get("cpu"), -1.0),
        _member(Code, one.get("where"), Code.UNKNOWN),
        _lines(one.get("stack")),
        _text(one.get("place"))[:500],
        _text(dwells.get("place"))[:500],
        _number(dwells.get("seconds")),
        dwells.get("innermost") is True,
        _input(one.get("input")),
    )


def _input(value: object) -> InputView | None:
    one = _object(value)
    if not one:
        return None
    stopped = one.get("stopped")
    return InputView(
        _whole(one.get("read")),
        _number(one.get("read_ago")),
        _number(one.get("step_seconds")),
        tuple(_whole(pid) for pid in stopped[:_MAX_ITEMS]) if isinstance(stopped, list) else (),
        tuple((_whole(reader.get("pid")), _text(reader.get("state"))) for reader in _objects(one.get("readers"))),
    )


def _shard(value: object) -> ShardView | None:
    one = _object(value)
    if not one:
        return None
    return ShardView(_text(one.get("file")), _number(one.get("seconds")), _number(one.get("written_ago")))


def _store(value: object) -> StoreView | None:
    one = _object(value)
    if not one:
        return None
    return StoreView(
        _text(one.get("doing")),
        _number(one.get("busy")),
        _whole(one.get("queued")),
        _number(one.get("cpu"), -1.0),
        _member(Code, one.get("where"), Code.UNKNOWN),
        _lines(one.get("stack")),
    )


def _wait(one: Mapping[str, Any]) -> WaitView:
    return WaitView(
        _text(one.get("on")),
        _member(WaitKind, one.get("kind"), WaitKind.OTHER),
        _text(one.get("key")),
        _text(one.get("what")),
        _whole(one.get("step"), -2),
        _number(one.get("seconds")),
        _text(one.get("state")),
        _whole(one.get("bucket"), -1),
        _lines(one.get("names")),
    )


def _link(one: Mapping[str, Any]) -> LinkView:
    callback, kernel = _object(one.get("callback")), _object(one.get("kernel"))
    return LinkView(
        peer=_text(one.get("peer")),
        state=_text(one.get("state")),
        heard=_number(one.get("heard"), -1.0),
        incarnation=_text(one.get("incarnation")),
        path=_text(one.get("path")),
        sent=_whole(one.get("sent")),
        received=_whole(one.get("received")),
        moved=_whole(one.get("moved")),
        moving=tuple(_moving(transfer) for transfer in _objects(one.get("moving"))),
        callback=_text(callback.get("name")),
        callback_seconds=_number(callback.get("seconds")),
        callback_stack=_lines(callback.get("stack")),
        finding=_text(one.get("finding")),
        refusal=_member(Cause, one.get("refusal"), None),
        answer=_member(Reach, one.get("answer"), Reach.NOT_ASKED),
        last_end=_text(one.get("last_end")),
        by_rdma=one.get("rdma") is True,
        watched=_number(kernel.get("watched")),
        waiting=_whole(kernel.get("waiting")),
        segments_in=_whole(kernel.get("segments_in")),
        quiet=_number(kernel.get("quiet")),
        retransmits=_whole(kernel.get("retransmits")),
        resent=_whole(kernel.get("resent")),
        stuck=_whole(kernel.get("stuck")),
        path_mtu=_whole(kernel.get("path_mtu")),
    )


def _moving(one: Mapping[str, Any]) -> MovingView:
    return MovingView(
        _text(one.get("what")),
        _whole(one.get("step"), -2),
        _whole(one.get("bucket"), -1),
        _whole(one.get("bytes")),
        _number(one.get("seconds")),
    )


def _tensor(one: Mapping[str, Any]) -> TensorView:
    return TensorView(
        _text(one.get("kind")),
        _whole(one.get("number"), -2),
        _whole(one.get("bucket"), -1),
        _text(one.get("peer")),
        {plain(name): _number(age) for name, age in _object(one.get("ages")).items()},
        {plain(name): _whole(count) for name, count in _object(one.get("counts")).items()},
    )


def _server_side(one: Mapping[str, Any]) -> ServerSideView:
    return ServerSideView(_whole(one.get("open_step"), -3), _whole(one.get("awaited")), one.get("linked") is True)


def _worker_side(one: Mapping[str, Any]) -> WorkerSideView:
    return WorkerSideView(
        one.get("linked") is True, one.get("granted") is True, _whole(one.get("pulls"), -2), _whole(one.get("done"), -1)
    )


def _bucket(one: Mapping[str, Any]) -> BucketView:
    return BucketView(
        _member(HeldBucketState, one.get("state"), None),
        _whole(one.get("version"), -2),
        one.get("busy") is True,
        _lines(one.get("arrived")),
    )
