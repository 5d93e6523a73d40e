"""The state of one task as plain JSON values: what ``Task.Snapshot`` serves and what a dump file holds.

Bounded, and made on demand only. What belongs to the machines is read on the loop's thread, so that it fits together;
where the loop does not come back, what it published last is shown.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.diagnose.fields import FORMAT
from lockstep.protocol import phrases
from lockstep.protocol.core.activity import Doing, InputWait, Learning, ShardWrite
from lockstep.protocol.core.ids import BucketId, Incarnation, JobId, Role, TaskId, hex64
from lockstep.protocol.core.journal import Journal, Record, tensor_states
from lockstep.protocol.core.machine import WholeTask
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import LOOP_ANSWER_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.runtime.processes import process_facts, uses_device
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.loop import Books, TaskLoop
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.trace.spans import parts_of_a_step, spans_of
from lockstep.runtime.watch.stacks import MAX_FRAMES, frames_of, place_in_program, whose_code
from lockstep.runtime.watch.status import MainThread, Sampler
from lockstep.security.refusals import REFUSALS
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.runtime.watch.reporting import Publisher

MAX_TENSORS = 2000
MAX_NAMES = 8
MAX_WAITS = 2000
MAX_RECORDS = 5000


class StoreStatus(Protocol):
    """What the thread of a server's store is doing."""

    doing: str
    since: float
    ident: int

    def queued(self) -> int: ...


class Shown(Protocol):
    """What a snapshot shows of a node."""

    task: TaskId
    incarnation: Incarnation
    job: JobId
    journal: Journal
    loop: TaskLoop
    main: MainThread
    peers: dict[TaskId, PeerKeeper]
    sampler: Sampler
    publisher: Publisher
    outcome: Outcome | None

    @property
    def machine(self) -> WholeTask: ...

    @property
    def cluster(self) -> ClusterSpec: ...

    @property
    def coordinator(self) -> TaskId:
        """The task that decides for the job now."""

    @property
    def phase_now(self) -> str: ...

    @property
    def known_plan(self) -> Plan | None: ...

    @property
    def store_status(self) -> StoreStatus | None: ...

    @property
    def shard_write(self) -> ShardWrite | None: ...

    def usual(self) -> float: ...


def snapshot_of(node: Shown, *, on_loop: bool = False) -> dict[str, Any]:
    """The whole snapshot. ``on_loop``: the caller is already on the loop's thread."""
    now = time.monotonic()
    loop = node.loop
    # A stuck loop has published its books before: a stuck task must still be able to answer.
    books = loop.read_books() if on_loop else loop.ask(loop.read_books, LOOP_ANSWER_SECONDS) or loop.books
    records = list(node.journal)
    node.sampler.sample_kernel(now)
    return {
        "format": FORMAT,
        "kind": "task",
        "time": time.time(),
        "task": str(node.task),
        "incarnation": hex64(node.incarnation),
        "job": hex64(node.job),
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cluster": dict(node.cluster.all_addresses()),
        "phase": node.phase_now,
        "step": node.machine.role.step,
        "outcome": "" if node.outcome is None else node.outcome.sentence(),
        "ended": ended_fields(node.outcome),
        "steps": {
            "done": node.sampler.steps_done(),
            "median": node.sampler.median(),
            "usual": node.usual(),
        },
        "main": _main(node, now),
        "learning": _learning(node.main.learning),
        **_shown_books(node, books, now),
        "links": [_link(node, peer, keeper, now) for peer, keeper in node.peers.items()],
        "tensors": _tensors(node, records, now),
        "progress": {"seconds": now - node.sampler.progress_at, "what": node.sampler.progress},
        "loop": _loop(node, now),
        "store": _store(node, now),
        "parts": parts_of_a_step(records, node.task.role),
        "spans": spans_of(records, node.task.role, now),
        "memory": _memory(),
        "disk": _disk(node, now),
        "shard": _shard_write(node.shard_write, now),
        "refused": REFUSALS.summary(),
        "threads": sorted(thread.name for thread in threading.enumerate())[:200],
    }


def ended_fields(outcome: Outcome | None) -> dict[str, Any] | None:
    """Why the job is over on this task; None while it runs, and where it ended well or goes on."""
    if outcome is None or outcome.ok or outcome.again or outcome.alone:
        return None
    reason = outcome.reason
    return {
        "culprit": outcome.culprit,
        "step": outcome.step,
        "cause": reason.cause.value,
        "source": reason.source.value,
        "text": reason.text,
    }


def _memory() -> dict[str, int]:
    import psutil  # here, because it is not needed for a start

    return {"resident": psutil.Process().memory_info().rss, "available": psutil.virtual_memory().available}


def journal_rows(node: Shown) -> list[dict[str, Any]]:
    """The newest rows of the journal, named, with the bytes that each bucket has."""
    plan, now = node.known_plan, time.monotonic()
    return [_row(record, plan, now) for record in list(node.journal)[-MAX_RECORDS:]]


def _row(record: Record, plan: Plan | None, now: float) -> dict[str, Any]:
    known = plan is not None and 0 <= record.bucket < len(plan.buckets)
    return {
        "ago": round(now - record.at, 6),
        "happening": record.happening.value,
        "step": record.step,
        "bucket": record.bucket,
        "peer": "" if record.peer is None else str(record.peer),
        "bytes": plan.buckets[record.bucket].nbytes if known and plan is not None else 0,
        "cause": record.cause,
        "share": record.share,
    }


# -- the machines --


def _shown_books(node: Shown, books: Books, now: float) -> dict[str, Any]:
    doing, _, since = node.main.now()
    waits = [_wait(node, wait, now, doing, since) for wait in books.waits[:MAX_WAITS]]
    return {"machines": books.snapshot, "waits": waits}


def _wait(node: Shown, wait: Wait, now: float, doing: Doing, main_since: float) -> dict[str, Any]:
    seconds = now - wait.since
    if wait.kind is WaitKind.PARAMETER and doing is Doing.WAITING:
        # The request was sent early; nothing was blocked before the training thread reached the wait.
        seconds = min(seconds, now - main_since)
    return {
        "on": str(wait.on),
        "kind": wait.kind.value,
        "key": "" if wait.key is None else str(wait.key),
        "what": phrases.waited_for(wait),
        "step": wait.step,
        "seconds": max(0.0, seconds),
        "state": wait.state,
        "bucket": wait.bucket,
        "names": _names(node.known_plan, wait.bucket),
    }


def _names(plan: Plan | None, bucket: BucketId) -> list[str]:
    if plan is None or not 0 <= bucket < len(plan.buckets):
        return []
    names = plan.names_in(bucket)
    more = [f"and {len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return [*names[:MAX_NAMES], *more]


# -- threads, links, tensors --


def _main(node: Shown, now: float) -> dict[str, Any]:
    if node.task.role is Role.SERVER:
        return {}  # it has no training thread; its store is shown instead
    doing, detail, since = node.main.now()
    stack = frames_of(node.main.ident, None)
    dwelling = node.sampler.dwelling
    return {
        "doing": doing,
        "detail": detail,
        "seconds": now - since,
        "cpu": node.sampler.main_cpu(),
        "where": whose_code(stack, on_device=node.main.on_device or uses_device(os.getpid())),
        "stack": stack[:MAX_FRAMES],
        "place": place_in_program(node.main.ident),
        "dwells": {"place": dwelling.place, "seconds": dwelling.seconds, "innermost": dwelling.innermost},
        "input": _input(node.main.input, now) if doing is Doing.INPUT else None,
    }


def _learning(told: Learning) -> dict[str, Any]:
    finite = told.loss is not None and math.isfinite(told.loss)
    return {"batch": told.batch, "loss": told.loss if finite else None, "step": told.step}


def _input(wait: InputWait | None, now: float) -> dict[str, Any] | None:
    if wait is None:
        return None
    found = [facts for facts in map(process_facts, wait.pids) if facts is not None]
    return {
        "read": wait.read,
        "read_ago": now - wait.read_at,
        "step_seconds": now - wait.step_since,
        "stopped": [facts.pid for facts in found if facts.stopped],
        "readers": [{"pid": facts.pid, "state": facts.state} for facts in found],
    }


def _link(node: Shown, peer: TaskId, keeper: PeerKeeper, now: float) -> dict[str, Any]:
    facts = keeper.facts(now)
    plan = node.known_plan
    for moving in facts["moving"]:
        known = plan is not None and 0 <= moving["bucket"] < len(plan.buckets)
        moving["bytes"] = plan.buckets[moving["bucket"]].nbytes if known and plan is not None else 0
    facts["kernel"] = node.sampler.kernel_facts(keeper.host_address())
    callback = facts["callback"]
    if callback is not None:
        callback["stack"] = frames_of(callback.pop("ident"))
    return {"peer": str(peer), "moved": node.sampler.moved(peer), **facts}


def _tensors(node: Shown, records: list[Record], now: float) -> list[dict[str, Any]]:
    first = node.machine.role.step - 1
    return [
        {
            "kind": one.kind,
            "number": one.number,
            "bucket": one.bucket,
            "peer": "" if one.peer is None else str(one.peer),
            "ages": {state.value: round(now - at, 3) for state, at in one.times.items()},
            "counts": {state.value: count for state, count in one.counts.items()},
        }
        for one in tensor_states(records, node.task.role, first, MAX_TENSORS)
    ]


def _loop(node: Shown, now: float) -> dict[str, Any]:
    busy_since, what = node.loop.busy
    busy = now - busy_since if busy_since else 0.0
    stack = frames_of(node.loop.ident) if busy > 1.0 else []
    return {"busy": busy, "what": what, "queued": node.loop.queued(), "stack": stack}


def _store(node: Shown, now: float) -> dict[str, Any]:
    store = node.store_status
    if store is None:
        return {}
    busy = now - store.since if store.since else 0.0
    stack = frames_of(store.ident) if busy > 0.5 else []
    return {
        "doing": store.doing,
        "busy": busy,
        "queued": store.queued(),
        "cpu": node.sampler.store_cpu(),
        "where": whose_code(stack, on_device=uses_device(os.getpid())),
        "stack": stack,
    }


def _shard_write(write: ShardWrite | None, now: float) -> dict[str, Any] | None:
    if write is None:
        return None
    return {"file": write.file, "seconds": now - write.since, "written_ago": now - write.wrote_at}


def _disk(node: Shown, now: float) -> dict[str, Any]:
    folder = str(node.publisher.folder.nearest)
    try:
        free = shutil.disk_usage(folder).free if folder else -1
    except OSError:
        free = -1
    return {"folder": folder, "free": free, "written_ago": node.sampler.written_ago(now)}
