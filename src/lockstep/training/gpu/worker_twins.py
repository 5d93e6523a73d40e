"""A worker's side of the twins: gradients that servers on its GPU read there, and parameters that it reads there."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.gpu.gpu_twins import MOST_TASKS, OpenedTwins, OwnTwins, PeerTwin, TwinLookup
from lockstep.training.gpu.ipc_memory import CannotShareError, CudaMemoryPool, GpuMemory
from lockstep.training.gpu.shared_events import is_on_gpu, table_at
from lockstep.training.gpu.twin_places import twin_at


class WorkerTwins:
    """One thread opens the servers' twins; any may ask."""

    def __init__(self, node: WorkerNode, plan: Plan, gpu: GpuMemory, gradients: memoryview) -> None:
        """``gradients``: the region that they are sent from, with room for the tables."""
        self._node, self._plan, self._gpu = node, plan, gpu
        self._own = OwnTwins(gpu, [gradients], plan.arena_bytes, twin_at(plan.arena_bytes, plan))
        self._own.offer(node.task.index, node.config.cluster.shape.workers)
        self.leaving: Tensor = self._own.tensors[0]
        """What servers read instead of the region."""
        self._servers = OpenedTwins(gpu)
        self._near: list[PeerTwin | None] = [None] * plan.servers
        self._read_in_host: set[int] = set()
        """Servers that lent a slot without a twin: it is read in host memory from then on, and must be filled there."""
        self._told: set[int] = set()

    @classmethod
    def of(cls, node: WorkerNode, plan: Plan, device: torch.device, gradients: memoryview) -> WorkerTwins | None:
        """Those of this worker; None, and a line that says why, where GPU memory cannot be shared."""
        shape = node.config.cluster.shape
        if not node.reads_in_place or not plan.buckets or max(shape.workers, plan.servers) > MOST_TASKS:
            return None
        try:
            return cls(node, plan, CudaMemoryPool(device), gradients)
        except CannotShareError as error:
            node.tell_path(f"{node.task.short}: its GPU's memory cannot be shared: {error}")
            return None

    def open(self, server: int, lent: memoryview) -> bool:
        """Open the twin of what this server lends; returns whether it is open."""
        room = self._plan.shard_room(server)
        found, is_new = self._servers.open(lent, twin_at(room, self._plan), room)
        if found.twin is None:
            self._read_in_host.add(server)
            if is_new:
                self._tell_why_not(server, lent, found)
            return False
        if self._near[server] is None and server not in self._read_in_host:
            self._near[server] = found.twin
            self._own.tell(server, opened=True)
        return True

    def twin_of(self, lent: memoryview) -> Tensor | None:
        """The twin of the region that this is a part of, if it is open."""
        known = self._servers.get(lent)
        return None if known is None else known.tensor

    def is_read_by(self, server: int) -> bool:
        """Whether this server reads gradients in their twin, so that nobody reads them in host memory."""
        near, own = self._near[server], self._node.task.index
        if near is None:
            return False
        if near.has_opened(own):
            self._tell(server, " are on one GPU, and their tensors stay in its memory")
            return True
        if near.has_refused(own):
            self._tell(server, ": gradients cross host memory: the server could not open the worker's memory")
        return False

    def _tell_why_not(self, server: int, lent: memoryview, found: TwinLookup) -> None:
        at, buckets = table_at(self._plan.shard_room(server)), len(self._plan.buckets)
        if found.reason:
            self._tell(server, f": their tensors cross host memory: {found.reason}")
        elif is_on_gpu(lent, at, buckets, self._gpu.gpu):
            self._tell(server, ": their tensors cross host memory: the server could not share its GPU's")

    def _tell(self, server: int, what: str) -> None:
        """Once for each server."""
        if server not in self._told:
            self._told.add(server)
            self._node.tell_path(f"{self._node.task.short} and {TaskId(Role.SERVER, server).short}{what}")

    def close(self) -> None:
        """Close the servers' twins and free the own one; nothing that is queued here uses them any more."""
        self._servers.forget()
        self._near = [None] * len(self._near)
        self._own.close()
