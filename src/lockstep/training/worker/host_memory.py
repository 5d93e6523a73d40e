"""A worker's arenas in host memory, where the transport reads gradients and writes parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from lockstep.protocol.core.ids import BucketId, Step
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.tensors import as_tensor
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.lent_parameters import LentParameters
from lockstep.transports.base import Loan


class HostMemory:
    """For models on the CPU: no copy between the model's memory and the transport's."""

    stays_on_gpu = False
    arrives_in_parts = True

    def __init__(self, node: WorkerNode, plan: Plan, *, in_place: bool, wire: WireFormat) -> None:
        """``in_place``: nothing writes to the parameters here, so they may be read in a server's memory."""
        gradients, parameters = node.allocate(plan, in_place=in_place)
        self._plan = plan
        self._wire = wire
        self._leaving: Tensor = as_tensor(gradients.buffer, torch.uint8)
        self.gradients: Tensor = torch.zeros_like(self._leaving) if wire.narrows else self._leaving
        self.parameters: Tensor = as_tensor(parameters.buffer, torch.uint8)
        self._node = node
        self._lent = LentParameters(plan, self.parameters)

    def arrived(self, bucket: BucketId, version: int, loan: Loan | None) -> None:  # noqa: ARG002 - the node counts it
        """Loop's thread: a bucket is in the arena, which already is the model's memory, or in a loan."""
        if loan is not None:
            self._lent.arrived(bucket, loan)

    def filled(self, step: Step, bucket: BucketId, *, in_full: bool = False) -> None:
        """Training thread: the gradient bucket is complete. ``in_full``: it holds parameters, which are not rounded."""
        if not self._wire.narrows:
            self._node.produced(step, bucket)
            return
        nbytes = self._wire.put(self._plan.buckets[bucket], self.gradients, self._leaving, in_full=in_full)
        self._node.produced(step, bucket, nbytes)

    def after_filled(self, action: Callable[[], None]) -> None:
        """Training thread: do this once every bucket filled so far has been passed on; here they have been."""
        action()

    def in_order(self, action: Callable[[], None]) -> None:
        """Training thread: do this after everything that was passed on or requested so far; here that is done."""
        action()

    def initial_values_are_in(self) -> None:
        """Chief: the gradient arena holds the initial parameters, which are sent in full precision."""
        if self._wire.narrows:
            self._leaving.copy_(self.gradients)
        self._node.offer_initial()

    def wait(self, version: int) -> int:
        """Training thread: block until the parameters are at ``version`` or later; returns their version."""
        return self._node.wait_version(version)

    def settle(self, version: int, buckets: Collection[BucketId]) -> None:
        """They are in the model's memory as soon as they arrive."""

    def newest(self, likes: Sequence[Tensor]) -> list[Tensor] | None:
        """Training thread: where the awaited values are, by parameter; None: all in the arena."""
        return self._lent.newest(likes)

    def take(self, parameters: Sequence[int], likes: Sequence[Tensor]) -> list[Tensor]:
        """Training thread: where the next values of these parameters are; their buckets have arrived."""
        return self._lent.take(parameters, likes)

    def release_former(self) -> None:
        """Training thread: nothing uses the previous version any more."""
        self._lent.release_former()

    def close(self) -> None:
        """Return all loans."""
        self._lent.close()
