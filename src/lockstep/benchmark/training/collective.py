"""Modes without servers: workers reduce gradients among themselves, with torch.distributed's own algorithms.

The same code as for your own program where every rank trains (``training/ranks``), with the benchmark's packing and
its optimizer. This worker's node (``runtime/task/collective_node.py``) is notified of what was handed over and what
came back; its watchdog and ``lockstep why`` compare the records of all workers and name the one that is behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.benchmark.settings.config import BUCKET_BYTES, BenchConfig, store_port
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.updates import LocalUpdates
from lockstep.protocol.core.messages import GroupRates, ParameterEntry
from lockstep.protocol.core.plan import Bucket, Piece, Plan, aligned
from lockstep.training.ranks.group import STORE_SECONDS, MeetingPoint, WorkerGroup
from lockstep.training.ranks.layout import RankLayout
from lockstep.training.ranks.rank_replica import RankReplica
from lockstep.training.ranks.torch_averager import TorchAverager
from lockstep.training.worker.replica import Trained


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
        patience=max(STORE_SECONDS, cluster.startup_timeout),
        backend=chosen,
        device=f"{cluster.worker_hosts[cluster.task.index]} {device}",
    )


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
        self._local = LocalUpdates(job, deferred=deferred)
        self._deferred = deferred
        exchange = job.config.exchange
        packed = pack(job.trained, exchange.bucket_bytes or BUCKET_BYTES, exchange.gradient_repacking)
        layout = layout_of(packed)
        self._averager = TorchAverager(group, layout, job.device)
        self._replica = RankReplica(self._averager, layout, ends_itself=False)

    def start(self) -> None:
        self._replica.start()
        for buffer in self._job.model.buffers():
            if buffer.is_floating_point():
                self._group.broadcast(buffer).wait()

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:
        self._replica.begin(step)
        self._local.begin(step, rates)

    def end(self) -> None:
        self._replica.end_backward()
        if self._deferred:
            # They are applied one step later; until then the next ones arrive where these are.
            for parameter in self._replica.parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        self._local.end()

    def settle(self) -> None:
        """They are."""

    def leave(self, steps: int) -> None:
        """All steps are made: wait for the other workers, and for the end of the job."""
        self._averager.leave(steps)

    def close(self) -> None:
        self._replica.close()


def layout_of(packed: Sequence[Sequence[Trained]]) -> RankLayout:
    """These buckets under the names that reports and traces use; no server holds them."""
    entries: list[ParameterEntry] = []
    planned: list[Bucket] = []
    arena = 0
    for number, members in enumerate(packed):
        dtype = str(members[0].parameter.dtype).removeprefix("torch.")
        pieces: list[Piece] = []
        offset = 0
        for member in members:
            elements = member.parameter.numel()
            pieces.append(Piece(len(entries), 0, elements, offset))
            entries.append(ParameterEntry(member.name, elements, dtype, member.group))
            offset += aligned(member.parameter.nbytes)
        planned.append(Bucket(number, 0, dtype, members[0].group, offset, arena, 0, tuple(pieces)))
        arena += offset
    plan = Plan(tuple(entries), 0, max((b.nbytes for b in planned), default=0), tuple(planned))
    return RankLayout(plan, tuple(one for members in packed for one in members), 0)
