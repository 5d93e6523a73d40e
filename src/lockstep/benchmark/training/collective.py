"""Modes without servers: workers reduce gradients among themselves, with torch.distributed's own algorithms.

Gradients are packed into buckets in the order in which backward produces them, and each bucket is reduced while
backward continues. This worker's node (``runtime/task/collective_node.py``) is notified of what was handed over and
what came back; its watchdog and ``lockstep why`` compare the records of all workers and name the one that is behind.
Torch's global process group is not used.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.benchmark.settings.config import BUCKET_BYTES, BenchConfig, store_port
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.listening import gloo_device, serve_store, stay_on_interface
from lockstep.benchmark.training.updates import LocalUpdates
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.messages import GroupRates, ParameterEntry
from lockstep.protocol.core.plan import Bucket, Piece, Plan
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.training.sealed_store import SealedStore, StoreForged
from lockstep.training.worker.replica import Trained

_LOOK_SECONDS = 0.5
_STORE_SECONDS = 60.0
"""All workers are up before they meet, so a request to worker 0's store takes only as long as the request itself."""


class CollectiveLost(RuntimeError):  # noqa: N818 - reads as the fact it states
    """The workers cannot meet; the text names the worker and the address."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the workers meet."""

    rank: int
    size: int
    host: str
    """Worker 0's."""
    own_host: str
    listen_host: str
    """Where this worker listens."""
    port: int
    patience: float
    backend: str


def meeting_of(config: BenchConfig, device: torch.device) -> MeetingPoint:
    """The meeting that a configuration describes."""
    cluster = config.cluster
    assert cluster is not None
    assert cluster.task is not None
    hosts = [address.rpartition(":") for address in cluster.worker_hosts]
    spec = config.exchange.all_reduce_spec or "collective"
    chosen = "nccl" if device.type == "cuda" and spec != "gloo" else "gloo"
    return MeetingPoint(
        rank=cluster.task.index,
        size=len(hosts),
        host=hosts[0][0].strip("[]"),
        own_host=hosts[cluster.task.index][0].strip("[]"),
        listen_host=cluster.listen_address().host,
        port=store_port(config),
        patience=max(_STORE_SECONDS, cluster.startup_timeout),
        backend=chosen,
    )


class WorkerGroup:
    """The workers of one run, after they have met."""

    def __init__(self, meeting: MeetingPoint, node: CollectiveNode) -> None:
        self.meeting = meeting
        self.node = node
        self._store = _sealed(meeting, _meet(meeting))
        self._group = _process_group(meeting, self._store)
        node.met(self._same_job(), self._lives())

    def _same_job(self) -> int:
        """One random number for the whole run, chosen by worker 0."""
        if self.meeting.rank == 0:
            self._store.set("job", str(secrets.randbits(63) + 1))
        return int(self._store.get("job"))

    def _lives(self) -> tuple[int, ...]:
        self._store.set(f"life/{self.meeting.rank}", str(self.node.incarnation))
        return tuple(int(self._store.get(f"life/{rank}")) for rank in range(self.meeting.size))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send worker 0's values to all workers."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()

    def reduce(self, tensor: Tensor) -> dist.Work:
        """Start a sum over all workers, in place."""
        work: dist.Work = self._group.allreduce([tensor])
        return work

    def wait_for_all(self, occasion: str) -> None:
        """A barrier: no worker leaves while others still need it, and worker 0, whose store it is, leaves last."""
        own, others = self.meeting.rank, range(1, self.meeting.size)
        try:
            self._store.set(f"{occasion}/{own}", "here")
            self._store.wait([f"{occasion}/{rank}" for rank in range(self.meeting.size)])
            if own == 0:
                self._store.wait([f"left {occasion}/{rank}" for rank in others])
            else:
                self._store.set(f"left {occasion}/{own}", "gone")
        except (RuntimeError, dist.DistError) as error:
            raise self.node.lost(_first_line(error)) from None


def _meet(meeting: MeetingPoint) -> c10d.TCPStore:
    try:
        if meeting.rank == 0:
            return serve_store(meeting.listen_host, meeting.port, meeting.size, meeting.patience)
        return c10d.TCPStore(
            meeting.host,
            meeting.port,
            meeting.size,
            timeout=timedelta(seconds=meeting.patience),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError, dist.DistError) as error:
        reason = _first_line(error)
        raise CollectiveLost(
            f"{_name(meeting.rank)} cannot meet the others at {meeting.host}:{meeting.port} ({reason}); "
            "start worker 0, or give a free --collective_port, the same on every worker."
        ) from None


def _sealed(meeting: MeetingPoint, store: c10d.Store) -> c10d.Store:
    """Nobody without the job's key can write an entry that the workers believe."""
    key = chosen_key()
    if key is None:
        return store
    try:
        return SealedStore(store, key.sub(Purpose.STORE), meeting.rank, meeting.size)
    except StoreForged as error:
        raise _forged(meeting, error) from None
    except (RuntimeError, dist.DistError) as error:
        where, reason = f"{meeting.host}:{meeting.port}", _first_line(error)
        raise CollectiveLost(f"not all workers came to {where} within {meeting.patience:g} s ({reason})") from None


def _forged(meeting: MeetingPoint, error: StoreForged) -> CollectiveLost:
    return CollectiveLost(
        f"{error}; another program writes to {meeting.host}:{meeting.port}, or the workers have different keys: give "
        "them the same key, and let nobody else reach that port."
    )


def _process_group(meeting: MeetingPoint, store: c10d.Store) -> Any:
    patience = timedelta(seconds=meeting.patience)
    if meeting.backend == "nccl":
        stay_on_interface(meeting.listen_host)
        options = dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), meeting.rank, meeting.size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    gloo._devices = [gloo_device(meeting.own_host)]
    gloo._timeout = patience
    try:
        return dist.ProcessGroupGloo(c10d.PrefixStore("gloo", store), meeting.rank, meeting.size, gloo)
    except StoreForged as error:
        raise _forged(meeting, error) from None
    except RuntimeError as error:
        missing = [rank for rank in range(meeting.size) if not store.check([f"gloo/rank_{rank}"])]
        who = ", ".join(_name(rank) for rank in missing) or "a worker"
        reason = _first_line(error)
        raise CollectiveLost(
            f"not all workers arrived within {meeting.patience:g} s; missing: {who} ({reason})"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _name(rank: int) -> str:
    return str(TaskId(Role.WORKER, rank))


@dataclass(slots=True)
class _Bucket:
    """Gradients that are sent together; ``views`` are their places in ``flat``."""

    members: list[Trained]
    flat: Tensor
    views: list[Tensor]
    lacking: int = 0
    work: dist.Work | None = None
    got: set[int] = field(default_factory=set)


def pack(trained: Sequence[Trained], bucket_bytes: int, packs: int) -> list[list[Trained]]:
    """Parameters by bucket, the last parameter first. ``packs`` above 0: that many buckets of about equal size."""
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

    def __init__(self, job: BenchJob, group: WorkerGroup, *, deferred: bool = False) -> None:
        self._job = job
        self._group = group
        self._node = group.node
        self._local = LocalUpdates(job, deferred=deferred)
        self._step = 0
        self._handed = 0
        exchange = job.config.exchange
        self._buckets = [
            _make_bucket(members)
            for members in pack(job.trained, exchange.bucket_bytes or BUCKET_BYTES, exchange.gradient_repacking)
        ]
        self._handles: list[RemovableHandle] = []
        for number, bucket in enumerate(self._buckets):
            for place, member in enumerate(bucket.members):
                self._handles.append(self._hook(number, place, member))
        self._node.plan = plan_of(self._buckets)
        self._on_device: deque[tuple[int, int, dist.Work]] = deque()
        """NCCL only: work that is not known to be finished on the device, oldest first."""
        self._looking = threading.Lock()
        self._node.before_look = self._look_at_device

    def _hook(self, number: int, place: int, member: Trained) -> RemovableHandle:
        handle: RemovableHandle = member.parameter.register_post_accumulate_grad_hook(
            lambda _: self._on_gradient(number, place)
        )
        return handle

    def start(self) -> None:
        self._group.broadcast([t.parameter.data for t in self._job.trained])
        self._group.broadcast([buffer for buffer in self._job.model.buffers() if buffer.is_floating_point()])

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:
        self._look_at_device()
        self._node.raise_if_ended()
        self._node.begin_step(step)
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
        # In the same order on every worker: a bucket that fills early waits for those before it.
        while self._handed < len(self._buckets) and not self._buckets[self._handed].lacking:
            self._hand_over(self._handed)

    def _hand_over(self, number: int) -> None:
        bucket = self._buckets[number]
        try:
            bucket.work = self._group.reduce(bucket.flat)
        except RuntimeError as error:
            raise self._node.lost(_first_line(error)) from None
        self._node.handed_over(self._step, number)
        self._handed = number + 1

    def end(self) -> None:
        while self._handed < len(self._buckets):
            bucket = self._buckets[self._handed]
            for place, view in enumerate(bucket.views):
                if place not in bucket.got:
                    view.zero_()
            self._hand_over(self._handed)
        self._node.backward_ended(self._step)
        size = self._group.meeting.size
        for number, bucket in enumerate(self._buckets):
            self._wait(number, bucket)
            bucket.flat.div_(size)
            for member, view in zip(bucket.members, bucket.views, strict=True):
                member.parameter.grad = view.clone()
        self._node.between_steps()
        self._local.end()

    def _wait(self, number: int, bucket: _Bucket) -> None:
        """Wait for one bucket. The node's watchdog reports who is behind, and ends a wait that cannot succeed."""
        work = bucket.work
        assert work is not None
        if self._group.meeting.backend == "nccl":
            work.wait()  # only makes the GPU's stream wait
            self._on_device.append((self._step, number, work))
            return
        while not work.is_completed():
            self._node.raise_if_ended()
            _pause(work)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._node.lost(_first_line(error)) from None
        self._node.summed(self._step, number)

    def _look_at_device(self) -> None:
        """Notify the node of what the device has finished since the last check, without synchronising."""
        with self._looking:
            while self._on_device and self._on_device[0][2].is_completed():
                step, number, _ = self._on_device.popleft()
                self._node.summed(step, number)

    def settle(self) -> None:
        """They are."""

    def close(self) -> None:
        self._node.before_look = lambda: None
        for handle in self._handles:
            handle.remove()


def _pause(work: dist.Work) -> None:
    """Wait briefly for the work, without abandoning it if it is not done by then."""
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


def plan_of(buckets: Sequence[_Bucket]) -> Plan:
    """The buckets under the names that reports and traces use; no server holds them."""
    entries: list[ParameterEntry] = []
    planned: list[Bucket] = []
    for number, bucket in enumerate(buckets):
        dtype = str(bucket.flat.dtype).removeprefix("torch.")
        pieces: list[Piece] = []
        offset = 0
        for member in bucket.members:
            elements = member.parameter.numel()
            pieces.append(Piece(len(entries), 0, elements, offset))
            entries.append(ParameterEntry(member.name, elements, dtype, member.group))
            offset += member.parameter.nbytes
        planned.append(Bucket(number, 0, dtype, bucket.members[0].group, bucket.flat.nbytes, 0, 0, tuple(pieces)))
    return Plan(tuple(entries), 0, max((b.nbytes for b in planned), default=0), tuple(planned))
