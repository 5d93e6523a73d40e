"""A task's snapshot as a typed value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.diagnose.evidence import is_worker
from lockstep.diagnose.fields import (
    MAX_ITEMS,
    addresses_in,
    lines_of,
    load_fields,
    member_of,
    number_of,
    object_of,
    objects_of,
    text_of,
    whole_of,
)
from lockstep.diagnose.views import (
    BucketView,
    Ended,
    InputView,
    LinkView,
    MainView,
    MovingView,
    RefusedView,
    ServerSideView,
    ShardView,
    SpanView,
    StoreView,
    TaskView,
    TensorView,
    WaitView,
    WorkerSideView,
)
from lockstep.foreign import plain
from lockstep.protocol.core.activity import Code, Doing
from lockstep.protocol.core.causes import Cause, Reason, Source
from lockstep.protocol.core.parts import Part
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.worker.holdings import HeldBucketState


def read_task(data: bytes) -> TaskView:
    """A task's snapshot; SnapshotError for anything else."""
    fields = load_fields(data, "task")
    books, steps = object_of(fields.get("machines")), object_of(fields.get("steps"))
    role, loop = object_of(books.get("role")), object_of(fields.get("loop"))
    # Without servers each worker also does a server's work, for its share of the buckets.
    share = object_of(books.get("share")) if is_worker(text_of(fields.get("task"))) else role
    call, learning = object_of(books.get("call")), object_of(fields.get("learning"))
    progress, disk = object_of(fields.get("progress")), object_of(fields.get("disk"))
    return TaskView(
        task=text_of(fields.get("task")),
        incarnation=text_of(fields.get("incarnation")),
        job=text_of(fields.get("job")),
        version=text_of(fields.get("version")),
        host=text_of(fields.get("host")),
        pid=whole_of(fields.get("pid")),
        phase=text_of(fields.get("phase")),
        step=whole_of(fields.get("step"), -2),
        outcome=text_of(fields.get("outcome")),
        ended=_ended(fields.get("ended")),
        usual=number_of(steps.get("usual")),
        step_median=number_of(steps.get("median")),
        steps_done=whole_of(steps.get("done")),
        batch=whole_of(learning.get("batch")),
        loss=None if learning.get("loss") is None else number_of(learning.get("loss")),
        loss_step=whole_of(learning.get("step"), -1),
        main=_main(fields.get("main")),
        waits=tuple(_wait(one) for one in objects_of(fields.get("waits"))),
        links={link.peer: link for link in map(_link, objects_of(fields.get("links")))},
        tensors=tuple(_tensor(one) for one in objects_of(fields.get("tensors"))),
        wants_version=whole_of(role.get("wants_version"), -2),
        sealed=whole_of(role.get("sealed"), -2),
        servers={text_of(one.get("task")): _server_side(one) for one in objects_of(role.get("servers"))},
        workers={text_of(one.get("task")): _worker_side(one) for one in objects_of(share.get("workers"))},
        buckets={whole_of(one.get("id"), -1): _bucket(one) for one in objects_of(role.get("buckets"))},
        served={whole_of(one.get("id"), -1): _bucket(one) for one in objects_of(share.get("buckets"))},
        served_step=whole_of(share.get("step"), -2),
        committed=whole_of(share.get("committed"), -2),
        lacks_replica=bool(books.get("coordinator")) and role.get("whole") is False,
        handed=_pair(role.get("handed")),
        call=_place(call.get("place")) if call.get("open") is True else None,
        called=_place(call.get("place")),
        still=number_of(progress.get("seconds")),
        loop_busy=number_of(loop.get("busy")),
        loop_what=text_of(loop.get("what")),
        loop_queued=whole_of(loop.get("queued")),
        loop_stack=lines_of(loop.get("stack")),
        store=_store(fields.get("store")),
        disk_free=whole_of(disk.get("free"), -1),
        disk_folder=text_of(disk.get("folder")),
        written_ago=number_of(disk.get("written_ago"), -1.0),
        shard=_shard(fields.get("shard")),
        available_memory=whole_of(object_of(fields.get("memory")).get("available"), -1),
        parts={plain(name): number_of(value) for name, value in object_of(fields.get("parts")).items()},
        cluster=addresses_in(fields),
        spans=tuple(read_span(one) for one in objects_of(fields.get("spans"))),
        refused=read_refused(fields),
    )


def read_refused(fields: Mapping[str, Any]) -> RefusedView | None:
    """In the snapshots of tasks and of monitors."""
    one = object_of(fields.get("refused"))
    if not one:
        return None
    last = object_of(one.get("last"))
    entrance, caller, why = (text_of(last.get(name))[:100] for name in ("entrance", "caller", "why"))
    return RefusedView(whole_of(one.get("callers")), entrance, caller, why)


def _ended(value: object) -> Ended | None:
    one = object_of(value)
    if not one:
        return None
    cause = member_of(Cause, one.get("cause"), Cause.UNKNOWN)
    reason = Reason(cause, text_of(one.get("text")), member_of(Source, one.get("source"), Source.RULE))
    return Ended(text_of(one.get("culprit")), whole_of(one.get("step"), -2), reason)


def _pair(value: object) -> tuple[int, int] | None:
    return (whole_of(value[0], -1), whole_of(value[1], -1)) if isinstance(value, list) and len(value) == 2 else None


def _place(value: object) -> tuple[int, ...] | None:
    return tuple(whole_of(one, -1) for one in value) if isinstance(value, list) and len(value) == 3 else None


def read_span(one: Mapping[str, Any]) -> SpanView:
    """A part of one of the last steps."""
    part = member_of(Part, one.get("part"), None)
    return SpanView(part, text_of(one.get("what")), number_of(one.get("begin")), number_of(one.get("end")))


def _main(value: object) -> MainView | None:
    one = object_of(value)
    if not one:
        return None
    dwells = object_of(one.get("dwells"))
    return MainView(
        member_of(Doing, one.get("doing"), Doing.NOTHING),
        text_of(one.get("detail")),
        number_of(one.get("seconds")),
        number_of(one.get("cpu"), -1.0),
        member_of(Code, one.get("where"), Code.UNKNOWN),
        lines_of(one.get("stack")),
        text_of(one.get("place"))[:500],
        text_of(dwells.get("place"))[:500],
        number_of(dwells.get("seconds")),
        dwells.get("innermost") is True,
        _input(one.get("input")),
    )


def _input(value: object) -> InputView | None:
    one = object_of(value)
    if not one:
        return None
    stopped = one.get("stopped")
    return InputView(
        whole_of(one.get("read")),
        number_of(one.get("read_ago")),
        number_of(one.get("step_seconds")),
        tuple(whole_of(pid) for pid in stopped[:MAX_ITEMS]) if isinstance(stopped, list) else (),
        tuple((whole_of(reader.get("pid")), text_of(reader.get("state"))) for reader in objects_of(one.get("readers"))),
    )


def _shard(value: object) -> ShardView | None:
    one = object_of(value)
    if not one:
        return None
    return ShardView(text_of(one.get("file")), number_of(one.get("seconds")), number_of(one.get("written_ago")))


def _store(value: object) -> StoreView | None:
    one = object_of(value)
    if not one:
        return None
    return StoreView(
        text_of(one.get("doing")),
        number_of(one.get("busy")),
        whole_of(one.get("queued")),
        number_of(one.get("cpu"), -1.0),
        member_of(Code, one.get("where"), Code.UNKNOWN),
        lines_of(one.get("stack")),
    )


def _wait(one: Mapping[str, Any]) -> WaitView:
    return WaitView(
        text_of(one.get("on")),
        member_of(WaitKind, one.get("kind"), WaitKind.OTHER),
        text_of(one.get("key")),
        text_of(one.get("what")),
        whole_of(one.get("step"), -2),
        number_of(one.get("seconds")),
        text_of(one.get("state")),
        whole_of(one.get("bucket"), -1),
        lines_of(one.get("names")),
    )


def _link(one: Mapping[str, Any]) -> LinkView:
    callback, kernel = object_of(one.get("callback")), object_of(one.get("kernel"))
    return LinkView(
        peer=text_of(one.get("peer")),
        state=text_of(one.get("state")),
        heard=number_of(one.get("heard"), -1.0),
        incarnation=text_of(one.get("incarnation")),
        path=text_of(one.get("path")),
        sent=whole_of(one.get("sent")),
        received=whole_of(one.get("received")),
        moved=whole_of(one.get("moved")),
        moving=tuple(_moving(transfer) for transfer in objects_of(one.get("moving"))),
        callback=text_of(callback.get("name")),
        callback_seconds=number_of(callback.get("seconds")),
        callback_stack=lines_of(callback.get("stack")),
        finding=text_of(one.get("finding")),
        refusal=member_of(Cause, one.get("refusal"), None),
        answer=member_of(Reach, one.get("answer"), Reach.NOT_ASKED),
        last_end=text_of(one.get("last_end")),
        by_rdma=one.get("rdma") is True,
        watched=number_of(kernel.get("watched")),
        waiting=whole_of(kernel.get("waiting")),
        segments_in=whole_of(kernel.get("segments_in")),
        quiet=number_of(kernel.get("quiet")),
        retransmits=whole_of(kernel.get("retransmits")),
        resent=whole_of(kernel.get("resent")),
        stuck=whole_of(kernel.get("stuck")),
        path_mtu=whole_of(kernel.get("path_mtu")),
    )


def _moving(one: Mapping[str, Any]) -> MovingView:
    return MovingView(
        text_of(one.get("what")),
        whole_of(one.get("step"), -2),
        whole_of(one.get("bucket"), -1),
        whole_of(one.get("bytes")),
        number_of(one.get("seconds")),
    )


def _tensor(one: Mapping[str, Any]) -> TensorView:
    return TensorView(
        text_of(one.get("kind")),
        whole_of(one.get("number"), -2),
        whole_of(one.get("bucket"), -1),
        text_of(one.get("peer")),
        {plain(name): number_of(age) for name, age in object_of(one.get("ages")).items()},
        {plain(name): whole_of(count) for name, count in object_of(one.get("counts")).items()},
    )


def _server_side(one: Mapping[str, Any]) -> ServerSideView:
    return ServerSideView(whole_of(one.get("open_step"), -3), whole_of(one.get("awaited")), one.get("linked") is True)


def _worker_side(one: Mapping[str, Any]) -> WorkerSideView:
    return WorkerSideView(
        one.get("linked") is True,
        one.get("granted") is True,
        whole_of(one.get("pulls"), -2),
        whole_of(one.get("done"), -1),
    )


def _bucket(one: Mapping[str, Any]) -> BucketView:
    return BucketView(
        member_of(HeldBucketState, one.get("state"), None),
        whole_of(one.get("version"), -2),
        one.get("busy") is True,
        lines_of(one.get("arrived")),
    )
