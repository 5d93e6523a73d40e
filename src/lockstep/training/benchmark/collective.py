"""Modes without servers: workers reduce gradients among themselves, with torch.distributed's own algorithms.

Gradients are packed into buckets in the order in which backward makes them, and each bucket is reduced while backward
goes on. Every worker notes in the store that they all share which bucket it has handed over last, so whoever waits can
name the worker that is behind, and the tensors that it lacks. No process group of torch's own global kind is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.protocol.ids import Role, TaskId
from lockstep.protocol.messages import GroupRates
from lockstep.training.benchmark.job import BenchJob
from lockstep.training.benchmark.updates import LocalUpdates
from lockstep.training.config import BenchConfig
from lockstep.training.replica import Trained

NOTICE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_NAMES_SHOWN = 4

Say = Callable[[str], None]


class CollectiveLost(RuntimeError):  # noqa: N818 - reads as the fact it states
    """The workers can no longer reduce together; the text names the worker, the step and the tensors."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the workers find one another. ``say`` gets notices."""

    rank: int
    size: int
    host: str
    """Worker 0's."""
    own_host: str
    port: int
    patience: float
    stall_after: float
    backend: str
    say: Say


def meeting_of(config: BenchConfig, device: torch.device, say: Say) -> Meeting:
    """The meeting that a configuration describes."""
    cluster = config.cluster
    assert cluster is not None
    assert cluster.task is not None
    hosts = [address.rpartition(":") for address in cluster.worker_hosts]
    spec = config.exchange.all_reduce_spec or "collective"
    chosen = "nccl" if device.type == "cuda" and spec != "gloo" else "gloo"
    return Meeting(
        rank=cluster.task.index,
        size=len(hosts),
        host=hosts[0][0].strip("[]"),
        own_host=hosts[cluster.task.index][0].strip("[]"),
        port=config.exchange.collective_port or int(hosts[0][2]) + 1,
        patience=cluster.startup_timeout,
        stall_after=cluster.stall_after,
        backend=chosen,
        say=say,
    )


class Group:
    """The workers of one run, met."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._store = _meet(meeting)
        self._group = _process_group(meeting, self._store)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give everybody worker 0's values."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()

    def reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum over all workers, in place."""
        work: dist.Work = self._group.allreduce([tensor])
        return work

    def note(self, step: int, bucket: int) -> None:
        """Say that this worker has handed over a bucket."""
        self._store.set(f"at/{self.meeting.rank}", f"{step} {bucket}")

    def behind(self, step: int, bucket: int) -> list[int]:
        """Workers that have not handed this bucket over yet."""
        found = []
        for rank in range(self.meeting.size):
            key = f"at/{rank}"
            at = tuple(int(word) for word in self._store.get(key).split()) if self._store.check([key]) else (-1, -1)
            if at < (step, bucket):
                found.append(rank)
        return found

    def wait_for_all(self, occasion: str) -> None:
        """A barrier: nobody leaves while others still need it."""
        self._store.set(f"{occasion}/{self.meeting.rank}", "here")
        self._store.wait([f"{occasion}/{rank}" for rank in range(self.meeting.size)])


def _meet(meeting: Meeting) -> c10d.TCPStore:
    try:
        return c10d.TCPStore(
            meeting.host,
            meeting.port,
            meeting.size,
            is_master=meeting.rank == 0,
            timeout=timedelta(seconds=meeting.patience),
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        reason = _first_line(error)
        raise CollectiveLost(
            f"{_name(meeting.rank)} cannot meet the others at {meeting.host}:{meeting.port} ({reason}); "
            "start worker 0, or give a free --collective_port, the same on every worker."
        ) from None


def _process_group(meeting: Meeting, store: c10d.TCPStore) -> Any:
    patience = timedelta(seconds=meeting.patience)
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), meeting.rank, meeting.size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.own_host)]
    gloo._timeout = patience
    try:
        return dist.ProcessGroupGloo(c10d.PrefixStore("gloo", store), meeting.rank, meeting.size, gloo)
    except RuntimeError as error:
        missing = [rank for rank in range(meeting.size) if not store.check([f"gloo/rank_{rank}"])]
        who = ", ".join(_name(rank) for rank in missing) or "a worker"
        reason = _first_line(error)
        raise CollectiveLost(f"not all workers came within {meeting.patience:g} s; missing: {who} ({reason})") from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _name(rank: int) -> str:
    return str(TaskId(Role.WORKER, rank))


@dataclass(slots=True)
class _Bucket:
    """Gradients that travel together; ``views`` are their places in ``flat``."""

    members: list[Trained]
    flat: Tensor
    views: list[Tensor]
    lacking: int = 0
    work: dist.Work | None = None
    got: set[int] = field(default_factory=set)


def pack(trained: Sequence[Trained], bucket_bytes: int, packs: int) -> list[list[Trained]]:
    """Parameters by bucket, the last parameter first. ``packs`` above 0 asks for so many buckets of about one size."""
    order = list(reversed(trained))
    total = sum(t.parameter.nbytes for t in order)
    limit = -(-total // packs) if packs else bucket_bytes
    packed: list[list[Trained]] = [[]]
    filled = 0
    for one in order:
        full = packed[-1] and filled + one.parameter.nbytes > limit
        if full and not (packs and len(packed) >= packs):
            packed.append([])
            filled = 0
        packed[-1].append(one)
        filled += one.parameter.nbytes
    return packed


class CollectiveUpdates:
    """Mean over all workers by all-reduce, then the same optimizer on each."""

    def __init__(self, job: BenchJob, group: Group, *, deferred: bool = False) -> None:
        self._job = job
        self._group = group
        self._local = LocalUpdates(job, deferred=deferred)
        self._step = 0
        self._handed = 0
        exchange = job.config.exchange
        self._buckets = [
            _make_bucket(members) for members in pack(job.trained, exchange.bucket_bytes, exchange.gradient_repacking)
        ]
        self._handles: list[RemovableHandle] = []
        for number, bucket in enumerate(self._buckets):
            for place, member in enumerate(bucket.members):
                self._handles.append(self._hook(number, place, member))

    def _hook(self, number: int, place: int, member: Trained) -> RemovableHandle:
        handle: RemovableHandle = member.parameter.register_post_accumulate_grad_hook(
            lambda _: self._on_gradient(number, place)
        )
        return handle

    def start(self) -> None:
        self._group.broadcast([t.parameter.data for t in self._job.trained])
        self._group.broadcast([buffer for buffer in self._job.model.buffers() if buffer.is_floating_point()])

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:
        self._step = step
        self._handed = 0
        for bucket in self._buckets:
            bucket.lacking, bucket.work = len(bucket.members), None
            bucket.got.clear()
        self._local.begin(step, rates)

    def _on_gradient(self, number: int, place: int) -> None:
        bucket = self._buckets[number]
        gradient = bucket.members[place].parameter.grad
        assert gradient is not None
        bucket.views[place].copy_(gradient)
        bucket.got.add(place)
        bucket.lacking -= 1
        # In the same order on every worker: a bucket that is full early waits for those before it.
        while self._handed < len(self._buckets) and not self._buckets[self._handed].lacking:
            self._hand_over(self._handed)

    def _hand_over(self, number: int) -> None:
        bucket = self._buckets[number]
        try:
            bucket.work = self._group.reduce(bucket.flat)
        except RuntimeError as error:
            raise CollectiveLost(f"{self._who_is_behind(number, bucket, 0.0)} ({_first_line(error)})") from None
        self._group.note(self._step, number)
        self._handed = number + 1

    def end(self) -> None:
        while self._handed < len(self._buckets):
            bucket = self._buckets[self._handed]
            for place, view in enumerate(bucket.views):
                if place not in bucket.got:
                    view.zero_()
            self._hand_over(self._handed)
        size = self._group.meeting.size
        for number, bucket in enumerate(self._buckets):
            self._wait(number, bucket)
            bucket.flat.div_(size)
            for member, view in zip(bucket.members, bucket.views, strict=True):
                member.parameter.grad = view.clone()
        self._local.end()

    def _wait(self, number: int, bucket: _Bucket) -> None:
        """Wait for one bucket; say after seconds who is behind, and end after the time for stalls."""
        work = bucket.work
        assert work is not None
        if self._group.meeting.backend == "nccl":
            work.wait()  # only makes the GPU's stream wait
            return
        begin = time.monotonic()
        told = False
        while not work.is_completed():
            waited = time.monotonic() - begin
            if waited > self._group.meeting.stall_after:
                raise CollectiveLost(self._who_is_behind(number, bucket, waited))
            if waited > NOTICE_SECONDS and not told:
                told = True
                self._group.meeting.say(f"notice: {self._who_is_behind(number, bucket, waited)}")
            _pause(work)
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveLost(
                f"{self._who_is_behind(number, bucket, time.monotonic() - begin)} ({_first_line(error)})"
            ) from None

    def _who_is_behind(self, number: int, bucket: _Bucket, waited: float) -> str:
        behind = [_name(rank) for rank in self._group.behind(self._step, number)]
        names = [member.name for member in bucket.members]
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > 4 else "")
        who = f"{', '.join(behind)} has not handed it over" if behind else "all workers have handed it over"
        own = _name(self._group.meeting.rank)
        return f"{own} waits {waited:.1f} s for the all-reduce of bucket {number} ({shown}) in step {self._step}: {who}"

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _pause(work: dist.Work) -> None:
    """Wait a little for the work, without giving it up if it is not done by then."""
    deadline = time.monotonic() + _LOOK_SECONDS
    pause = 0.0001
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.005)


def _make_bucket(members: list[Trained]) -> _Bucket:
    total = sum(member.parameter.numel() for member in members)
    first = members[0].parameter
    flat = torch.zeros(total, dtype=first.dtype, device=first.device)
    pieces = flat.split([member.parameter.numel() for member in members])
    views = [piece.view(member.parameter.shape) for piece, member in zip(pieces, members, strict=True)]
    return _Bucket(members, flat, views, len(members))
