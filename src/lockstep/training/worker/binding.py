"""A worker's trained parameters, bound to the arenas from which gradients are sent and in which new values arrive.

``fillings.py`` brings gradients from the model into the one arena, ``arrivals.py`` new values from the other into the
model. ``replica.py`` (the benchmark: a gradient is final when backward has made it) and ``sealed_replica.py`` (the
library: when ``optimizer.step()`` is called) make steps of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.messages import Layout, OptimizerEntry, Setting
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.tensors import entry_of, parameter_offsets, parameter_view
from lockstep.training.torch_private import foreach_copy_
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.cuda_memory import CudaMemory
from lockstep.training.worker.host_memory import HostMemory
from lockstep.transports.base import Loan


class ArenaMemory(Protocol):
    """Where the arenas are: in host memory, or on a GPU with host memory behind it."""

    gradients: Tensor
    parameters: Tensor

    @property
    def stays_on_gpu(self) -> bool:
        """Whether gradients are read where they are filled: then nothing is gained by sending them early."""

    def filled(self, step: Step, bucket: BucketId, *, in_full: bool = False) -> None: ...

    def after_filled(self, action: Callable[[], None]) -> None: ...

    def in_order(self, action: Callable[[], None]) -> None: ...

    def initial_values_are_in(self) -> None: ...

    def arrived(self, bucket: BucketId, version: int, loan: Loan | None) -> None: ...

    def wait(self, version: int) -> int: ...

    @property
    def arrives_in_parts(self) -> bool:
        """Whether it is worth while to use some parameters of a version before the others are here."""

    def settle(self, version: int, buckets: Collection[BucketId]) -> None:
        """These buckets of a version have arrived: block until they can be used."""

    def newest(self, likes: Sequence[Tensor]) -> list[Tensor] | None: ...

    def release_former(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Trained:
    """One trained parameter: its name in the model and its parameter group."""

    name: str
    parameter: nn.Parameter
    group: int


@dataclass(slots=True, eq=False)
class Bound:
    """One parameter and its places in the arenas."""

    trained: Trained
    index: int
    gradient: Tensor
    """The memory that its gradient is sent from."""
    value: Tensor
    buckets: tuple[BucketId, ...]
    local: Tensor
    """What the model computes with: the arena itself, or the worker's own copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BindingOptions:
    """How a model is bound."""

    bucket_bytes: int
    own_copy: bool
    """The model keeps its own memory and copies each version; otherwise it reads parameters where they arrive."""
    in_place: bool = False
    """Nothing writes to the parameters here, so they may be read in the servers' own memory if it is mapped."""
    wire: WireFormat = field(default_factory=WireFormat)
    """The format in which gradients are sent."""
    untrained: tuple[Setting, ...] = ()
    """Digests of what is not trained, compared with the chief's."""


class Binding:
    """The parameters of one worker in a cluster."""

    def __init__(
        self,
        node: WorkerNode,
        trained: Sequence[Trained],
        optimizers: tuple[OptimizerEntry, ...],
        options: BindingOptions,
    ) -> None:
        self.node = node
        entries = tuple(entry_of(t.name, t.parameter, t.group) for t in trained)
        self.plan: Plan = make_plan(entries, node.config.cluster.shape.servers, options.bucket_bytes)
        self.memory = _memory_for(node, self.plan, trained, options)
        self.bound = self._bind(trained, own_copy=options.own_copy)
        self._values = [bound.value for bound in self.bound]
        self._apart = [bound for bound in self.bound if bound.local is not bound.value]
        self.bytes_apart = sum(bound.value.nbytes for bound in self._apart)
        """Bytes of parameters in the model's own memory."""
        if isinstance(self.memory, CudaMemory):
            self._apart = _copied_by(self.memory, self._apart)
        layout = Layout(
            self.plan.hash,
            options.bucket_bytes,
            entries,
            optimizers,
            options.untrained,
            node.start_step,
            node.checkpoint,
        )
        node.announce(layout, self.memory.arrived)
        if node.task == CHIEF and node.start_step == INITIAL_STEP:
            self.let_values_leave()
            self.memory.initial_values_are_in()

    def _bind(self, trained: Sequence[Trained], *, own_copy: bool) -> list[Bound]:
        buckets: list[list[BucketId]] = [[] for _ in trained]
        for bucket in self.plan.buckets:
            for piece in bucket.pieces:
                buckets[piece.parameter].append(bucket.id)
        bound = []
        for index, (one, offset) in enumerate(zip(trained, parameter_offsets(self.plan), strict=True)):
            gradient = parameter_view(self.memory.gradients, offset, one.parameter)
            value = parameter_view(self.memory.parameters, offset, one.parameter)
            # Weights in another memory format (channels_last) keep it: kernels are chosen by it.
            apart = own_copy or not one.parameter.is_contiguous()
            local = one.parameter.data if apart else value
            # A separate tensor, or all gradients would share the arena's version counter.
            bound.append(Bound(one, index, gradient.data, value, tuple(buckets[index]), local))
        return bound

    def let_values_leave(self) -> None:
        """Copy the model's values to where gradients are sent from."""
        with torch.no_grad():
            for bound in self.bound:
                bound.gradient.copy_(bound.trained.parameter)

    def start(self) -> Step:
        """Block until the parameters of the first step have arrived, and make the model use them; returns that step."""
        first = self.memory.wait(max(self.node.start_step, 0))
        for bound in self.bound:
            bound.trained.parameter.data = bound.local
        self.use_all()
        return first

    def use_all(self) -> None:
        """All values of the next version have arrived: the model uses them from now on."""
        lent = self.memory.newest(self._values)
        self._copy(self._apart, lent)
        if lent is not None and len(self._apart) < len(self.bound):
            # About 0.3 us per parameter; a copy of the whole model costs hundreds of times as much.
            for bound, value in zip(self.bound, lent, strict=True):
                if bound.local is bound.value:
                    bound.trained.parameter.data = value
        self.memory.release_former()

    def _copy(self, some: Sequence[Bound], lent: Sequence[Tensor] | None) -> None:
        """To where the model has them."""
        if some:
            with torch.no_grad():
                foreach_copy_([b.local for b in some], [b.value if lent is None else lent[b.index] for b in some])

    def use(self, some: Sequence[Bound], version: int) -> None:
        """The next values of these parameters have arrived, perhaps not those of others: the model uses them."""
        self.memory.settle(version, {bucket for one in some for bucket in one.buckets})
        if not isinstance(self.memory, HostMemory):
            self._copy([one for one in some if one in self._apart], None)
            return
        for bound, value in zip(some, self.memory.take([one.index for one in some], self._values), strict=True):
            if bound.local is not bound.value:
                with torch.no_grad():
                    bound.local.copy_(value)
            elif bound.trained.parameter.data_ptr() != value.data_ptr():
                bound.trained.parameter.data = value

    def gpu_idle(self) -> float | None:
        """Seconds per step in which the GPU waited for parameters; None without a GPU."""
        return self.memory.idle.usual() if isinstance(self.memory, CudaMemory) else None

    def close(self) -> None:
        """Release the model and the arenas; the parameters keep their last values."""
        for bound in self.bound:
            bound.trained.parameter.data = bound.trained.parameter.data.clone()
        self.memory.close()


def _copied_by(memory: CudaMemory, apart: Sequence[Bound]) -> list[Bound]:
    """Let the memory copy what is in one bucket as soon as it arrives; the rest is copied when all have arrived."""
    left = []
    for bound in apart:
        if len(bound.buckets) == 1:
            memory.copy_on_arrival(bound.buckets[0], bound.local, bound.value)
        else:
            left.append(bound)
    return left


def _memory_for(node: WorkerNode, plan: Plan, trained: Sequence[Trained], options: BindingOptions) -> ArenaMemory:
    devices = {one.parameter.device for one in trained}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the model is on several devices ({names}); move all of it to one device")
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "cuda":
        return CudaMemory(node, plan, device, options.wire)
    return HostMemory(node, plan, in_place=options.in_place, wire=options.wire)
