"""``job.process_group()``: torch.distributed's own group of all workers, for programs that use it themselves.

Worker 0 runs a store, and tells the others through the job where it is; with a key every entry has a MAC
(``training/sealed_store.py``). What happens inside the group is torch's affair: its waits are not among ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.library.errors import UsageError
from lockstep.library.meeting import port_for_store
from lockstep.library.talking import Talk
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.training.ranks.group import STORE_SECONDS, CollectiveLost, MeetingPoint, make_global_group
from lockstep.training.torch_private import c10d
from lockstep.transports.control.addresses import parse_address


class OwnGroup:
    """The global group of one job, made when it is first asked for and destroyed with the job."""

    def __init__(self, cluster: ClusterSpec, talk: Talk, refuse_in_child: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._talk = talk
        self._refuse_in_child = refuse_in_child
        self._store: c10d.Store | None = None
        """If the group was made here: others may still read what worker 0's store has."""

    def get(self, device: torch.device) -> dist.ProcessGroup:
        self._refuse_in_child("job.process_group()")
        if not dist.is_initialized():
            try:
                self._store = make_global_group(self._meeting(device))
            except CollectiveLost as error:
                raise UsageError(f"job.process_group(): {error}") from None
        group = dist.group.WORLD
        assert group is not None
        size, workers = dist.get_world_size(), self._cluster.shape.workers
        if size != workers:
            raise UsageError(
                f"the program has made a group of {size} processes, and this job has {workers} workers: servers are "
                "not among them; call job.process_group() instead of torch.distributed.init_process_group()"
            )
        return group

    def _meeting(self, device: torch.device) -> MeetingPoint:
        cluster = self._cluster
        assert cluster.task is not None
        hosts = [parse_address(address).host for address in cluster.worker_hosts]
        own = hosts[cluster.task.index]
        return MeetingPoint(
            rank=cluster.task.index,
            size=len(hosts),
            host=hosts[0],
            own_host=own,
            listen_host=cluster.listen_address().host,
            port=port_for_store(cluster),
            patience=max(STORE_SECONDS, cluster.startup_timeout),
            backend="nccl" if device.type == "cuda" else "gloo",
            device=f"{own} {device}",
            find=lambda port: (hosts[0], self._talk.broadcast(port, 0, "job.process_group()")),
        )

    def close(self) -> None:
        """If it was made here. Another worker may be gone already."""
        if self._store is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._store = None
