"""A server's side of the twins: gradients read where its workers have them, and slots that they read on the GPU.

Its own twins are made when the first worker offers one: they take as much of the GPU as the slots take of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.plan import Plan
from lockstep.training.gpu.gpu_twins import MOST_TASKS, OpenedTwins, OwnTwins
from lockstep.training.gpu.ipc_memory import CannotShareError, CudaMemoryPool, GpuMemory
from lockstep.training.gpu.twin_places import twin_at

_MOST_SLOTS = 2
"""More are only needed where workers do not read the server's memory in place."""


class ServerTwins:
    """All calls come on the store's thread."""

    def __init__(self, gpu: GpuMemory, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        self._gpu, self._plan, self._server, self._slots = gpu, plan, server, slots
        self._own: OwnTwins | None = None
        self._cannot_offer = len(slots) > _MOST_SLOTS or server >= MOST_TASKS
        self._workers = OpenedTwins(gpu)

    @classmethod
    def on(cls, device: torch.device, plan: Plan, server: int, slots: Sequence[memoryview]) -> ServerTwins | None:
        """Those of a server on this GPU; None where GPU memory cannot be shared."""
        try:
            return cls(CudaMemoryPool(device), plan, server, slots)
        except CannotShareError:
            return None

    def find(self, bucket: BucketId, gradient: memoryview) -> Tensor | None:
        """The bytes of this gradient in its worker's twin, if there is one that can be opened."""
        plan = self._plan
        if self._cannot_offer:
            return None
        known = self._workers.get(gradient)
        if known is None:
            found, is_new = self._workers.open(gradient, twin_at(plan.arena_bytes, plan), plan.arena_bytes)
            if is_new and found.owner is not None:
                self._meet(found.owner, opened=found.twin is not None)
            known = found.twin
        if known is None or self._own is None:
            return None
        first = plan.buckets[bucket].arena_offset
        return known.tensor[first : first + gradient.nbytes]

    def _meet(self, worker: int, *, opened: bool) -> None:
        """A worker offers a twin: offer those of the slots in turn if it was opened, and say whether it was."""
        if self._own is None and opened:
            room = self._plan.shard_room(self._server)
            try:
                self._own = OwnTwins(self._gpu, self._slots, room, twin_at(room, self._plan))
            except CannotShareError:
                self._cannot_offer = True
                return
            self._own.offer(self._server, self._plan.servers)
        if self._own is not None:
            self._own.tell(worker, opened=opened)

    def slots(self) -> Sequence[Tensor]:
        """The twins of the slots, once a worker may read them."""
        return () if self._own is None else self._own.tensors

    @property
    def nbytes(self) -> int:
        return 0 if self._own is None else self._own.nbytes

    def host_is_read(self) -> bool:
        """Whether somebody may read a version in the slots themselves."""
        return self._own is None or not self._workers.all_have_opened(self._server)

    def forget(self) -> None:
        """Close the workers' twins: nothing that is queued uses them any more."""
        self._workers.forget()

    def close(self) -> None:
        """Close the workers' twins and free the own ones; nothing that is queued here uses them any more.

        Those that a worker has open are left to the end of this process: CUDA does not say what a reader would find.
        """
        is_read = self._workers.any_has_opened(self._server)
        self.forget()
        if self._own is not None and not is_read:
            self._own.close()
            self._own = None
