"""Ranks that meet and reduce with torch.distributed's own algorithms: gloo or NCCL. Its global group is not used."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lockstep.protocol.core.ids import BucketId, Role, Step, TaskId
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.cores import cgroup_folders, usable_cores
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.training.ranks.connections import Connections
from lockstep.training.ranks.listening import gloo_device, reach_store, serve_store, stay_on_interface
from lockstep.training.sealed_store import SealedStore, StoreForged
from lockstep.training.torch_private import c10d, gloo_options

STORE_SECONDS = 60.0
"""All workers are up before they meet, so a request to worker 0's store takes only as long as the request itself."""

MOST_LANES = 4
CORES_OF_LANE = 2
"""A connection keeps one thread of its own busy, and one of those that add up."""

_COMES, _CONNECTS = "host/{}", "connects/{}"
"""What each rank leaves in the store when it comes this far."""


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
    """Of worker 0's store; 0: any, which ``find`` tells the others."""
    patience: float
    backend: str
    """``nccl``: if possible."""
    device: str = ""
    """This worker's GPU, as no other device in the job is called."""
    find: Callable[[int], tuple[str, int]] | None = None
    """Takes the port of this worker's own store (worker 0's counts) and returns where worker 0's is."""


class ReducingNode(Protocol):
    """The node of a worker whose gradients torch.distributed carries: it is told of every bucket."""

    task: TaskId
    start_step: Step

    @property
    def tell_unsaved(self) -> Callable[[], bool]: ...

    def prepare(self, plan: Plan) -> None: ...

    def look_with(self, before_look: Callable[[], None]) -> None: ...

    def raise_if_ended(self) -> None: ...

    def begin_step(self, step: Step) -> None: ...

    def handed_over(self, step: Step, bucket: BucketId) -> None: ...

    def backward_ended(self, step: Step) -> None: ...

    def summed(self, step: Step, bucket: BucketId) -> None: ...

    def between_steps(self) -> None: ...

    def finish(self, steps: Step) -> None: ...

    def lost(self, problem: str) -> JobEndedError: ...

    def drifted(self, step: Step, parameter: str) -> JobEndedError: ...


class WorkerGroup:
    """The workers of one run, after they have met."""

    def __init__(self, meeting: MeetingPoint, node: ReducingNode) -> None:
        self.meeting = meeting
        self.node = node
        self._is_global = False
        self._store: Any = _sealed(meeting, _meet(meeting))
        self.backend = _choose(meeting, self._store)
        self._connections = Connections()
        with self._connections.made_here():
            self._group: Any = _process_group(meeting, self._store, self.backend)

    @property
    def on_device(self) -> bool:
        """Whether only the GPU's stream waits for what is reduced."""
        return self.backend == "nccl"

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start sending worker 0's values to all workers, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work: dist.Work = self._group.broadcast([tensor], options)
        return work

    def reduce(self, tensor: Tensor) -> dist.Work:
        """Start a reduction over all workers, in place: NCCL makes the mean, gloo the sum."""
        options = dist.AllreduceOptions()
        # The mean of one is its sum, for which NCCL need not touch the numbers.
        averages = self.on_device and self.meeting.size > 1
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        work: dist.Work = self._group.allreduce([tensor], options)
        return work

    def agree(self, name: str, value: str) -> tuple[str, str]:
        """Worker 0's value under this name beside this worker's own. Blocks until worker 0 has told its own."""
        if self.meeting.rank == 0:
            self._store.set(name, value)
            return value, value
        return bytes(self._store.get(name)).decode(), value

    def make_global(self) -> None:
        """Make torch.distributed's global group of the same workers, unless the program has made it."""
        if not dist.is_initialized():
            _make_global(self.meeting, self._store, self.backend)
            self._is_global = True

    def close(self, *, early: bool) -> None:
        """Let go of connections and threads; nothing can be reduced any more. ``early``: not all have come to the end,
        and what this worker still waits for may never arrive."""
        if early and not self.on_device:
            self._connections.cut()
        if self._is_global:
            dist.destroy_process_group()
            self._is_global = False
        self._group = self._store = None

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
        except RuntimeError as error:
            raise self.node.lost(first_line(error)) from None


def make_global_group(meeting: MeetingPoint) -> c10d.Store:
    """Make torch.distributed's global group of all workers: NCCL for tensors on GPUs if each worker has its own, gloo
    for all others. CollectiveLost if they cannot meet. Returns the store, which must be kept as long as the group."""
    store = _sealed(meeting, _meet(meeting))
    backend = _choose(meeting, store)
    if backend == "nccl":
        stay_on_interface(meeting.listen_host)
    _make_global(meeting, store, "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo")
    return store


def _make_global(meeting: MeetingPoint, store: c10d.Store, backend: str) -> None:
    prefixed, patience = c10d.PrefixStore("global", store), timedelta(seconds=meeting.patience)
    dist.init_process_group(backend, store=prefixed, timeout=patience, rank=meeting.rank, world_size=meeting.size)


def _choose(meeting: MeetingPoint, store: c10d.Store) -> str:
    """NCCL, if every worker can use it: each has a GPU of its own. Otherwise gloo, on every worker."""
    others = range(meeting.size)
    store.set(f"backend/{meeting.rank}", meeting.backend)
    store.set(f"device/{meeting.rank}", meeting.device)
    wanted = {bytes(store.get(f"backend/{rank}")) for rank in others}
    devices = {bytes(store.get(f"device/{rank}")) for rank in others}
    return "nccl" if wanted == {b"nccl"} and len(devices) == meeting.size else "gloo"


def _lanes(meeting: MeetingPoint, store: c10d.Store) -> int:
    """How many buckets gloo carries side by side: a connection is no faster than the one thread at each of its ends.
    As many as every rank has cores for, beside the others on its host."""
    store.set(_COMES.format(meeting.rank), f"{usable_cores(cgroup_folders())} {meeting.own_host}")
    told = [bytes(store.get(_COMES.format(rank))).decode().split(" ", 1) for rank in range(meeting.size)]
    ranks_on = Counter(host for _, host in told)
    return min(MOST_LANES, *(max(1, int(float(cores) / ranks_on[host] // CORES_OF_LANE)) for cores, host in told))


def _meet(meeting: MeetingPoint) -> c10d.Store:
    if meeting.size == 1:
        return c10d.HashStore()
    find = meeting.find or (lambda _port: (meeting.host, meeting.port))
    try:
        if meeting.rank == 0:
            store = serve_store(meeting.listen_host, meeting.port, meeting.size, meeting.patience)
            find(store.port)
            return store
        host, port = find(0)
        return reach_store(host, port, meeting.size, meeting.patience)
    except (RuntimeError, OSError) as error:
        reason = first_line(error)
        raise CollectiveLost(
            f"{_name(meeting.rank)} cannot meet the others at {meeting.host}:{meeting.port} ({reason}); "
            "start worker 0, or give a free --collective_port, the same on every worker."
        ) from None


def _sealed(meeting: MeetingPoint, store: c10d.Store) -> c10d.Store:
    """Nobody without the job's key can write an entry that the workers believe."""
    key = chosen_key()
    if key is None or meeting.size == 1:
        return store
    try:
        return SealedStore(store, key.sub(Purpose.STORE), meeting.rank, meeting.size)
    except StoreForged as error:
        raise _forged(meeting, error) from None
    except RuntimeError as error:
        where, reason = f"{meeting.host}:{meeting.port}", first_line(error)
        raise CollectiveLost(f"not all workers came to {where} within {meeting.patience:g} s ({reason})") from None


def _forged(meeting: MeetingPoint, error: StoreForged) -> CollectiveLost:
    return CollectiveLost(
        f"{error}; another program writes to {meeting.host}:{meeting.port}, or the workers have different keys: give "
        "them the same key, and let nobody else reach that port."
    )


def _process_group(meeting: MeetingPoint, store: c10d.Store, backend: str) -> Any:
    patience = timedelta(seconds=meeting.patience)
    if backend == "nccl":
        stay_on_interface(meeting.listen_host)
        options = dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), meeting.rank, meeting.size, options)
    told = _COMES
    try:
        devices = [gloo_device(meeting.own_host) for _ in range(_lanes(meeting, store))]
        told = _CONNECTS
        store.set(told.format(meeting.rank), "here")
        gloo = gloo_options(devices, patience)
        return dist.ProcessGroupGloo(c10d.PrefixStore("gloo", store), meeting.rank, meeting.size, gloo)
    except StoreForged as error:
        raise _forged(meeting, error) from None
    except RuntimeError as error:
        raise _not_all_came(meeting, store, told, error) from None


def _not_all_came(meeting: MeetingPoint, store: c10d.Store, told: str, error: Exception) -> CollectiveLost:
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):  # the store is lost with rank 0
        missing += [rank for rank in range(meeting.size) if not store.check([told.format(rank)])]
    who = ", ".join(_name(rank) for rank in missing) or "a worker"
    return CollectiveLost(
        f"not all workers arrived within {meeting.patience:g} s; missing: {who} ({first_line(error)})"
    )


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _name(rank: int) -> str:
    return str(TaskId(Role.WORKER, rank))
