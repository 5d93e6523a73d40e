"""A worker's trained parameters, bound to the arenas from which gradients are sent and in which new values arrive.

``replica.py`` (the benchmark: nothing touches gradients after backward) and ``sealed_replica.py`` (the library: users
may do anything with them until ``optimizer.step()``) add the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.messages import Layout, OptimizerEntry, Setting
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.tensors import entry_of, parameter_offsets, parameter_view
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.cuda_memory import CudaMemory
from lockstep.training.worker.host_memory import HostMemory
from lockstep.transports.base import Loan


class ArenaMemory(Protocol):
    """Where the arenas are: in host memory, or on a GPU with host memory behind it."""

    gradients: Tensor
    parameters: Tensor

    def filled(self, step: Step, bucket: BucketId, *, in_full: bool = False) -> None: ...

    def after_filled(self, action: Callable[[], None]) -> None: ...

    def in_order(self, action: Callable[[], None]) -> None: ...

    def initial_values_are_in(self) -> None: ...

    def arrived(self, bucket: BucketId, version: int, loan: Loan | None) -> None: ...

    def wait(self, version: int) -> int: ...

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
    """The memory of the model's gradient."""
    leaving: Tensor
    """The memory it is sent from: the same, or separate."""
    value: Tensor
    buckets: tuple[BucketId, ...]
    local: Tensor
    """What the model computes with: the arena itself, or the worker's own copy."""
    got_in: Step = -1
    """The step of its latest gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BindingOptions:
    """How a model is bound."""

    bucket_bytes: int
    own_copy: bool
    """The model keeps its own memory and copies each version; otherwise it reads parameters where they arrive."""
    apart: bool = False
    """The model's gradients are in separate memory, and are copied to where they are sent from."""
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
        self.step: Step = -1
        self._node = node
        self._own_copy = options.own_copy
        entries = tuple(entry_of(t.name, t.parameter, t.group) for t in trained)
        self.plan: Plan = make_plan(entries, node.config.cluster.shape.servers, options.bucket_bytes)
        self._memory = _memory_for(node, self.plan, trained, options)
        self._gradients = torch.zeros_like(self._memory.gradients) if options.apart else self._memory.gradients
        self._bound = self._bind(trained)
        self._apart = [bound for bound in self._bound if bound.local is not bound.value]
        if isinstance(self._memory, CudaMemory):
            self._apart = _copied_by(self._memory, self._apart)
        layout = Layout(
            self.plan.hash,
            options.bucket_bytes,
            entries,
            optimizers,
            options.untrained,
            node.start_step,
            node.checkpoint,
        )
        node.announce(layout, self._memory.arrived)
        if node.task == CHIEF and node.start_step == INITIAL_STEP:
            self._let_values_leave()
            self._memory.initial_values_are_in()

    def _bind(self, trained: Sequence[Trained]) -> list[Bound]:
        buckets: list[list[BucketId]] = [[] for _ in trained]
        for bucket in self.plan.buckets:
            for piece in bucket.pieces:
                buckets[piece.parameter].append(bucket.id)
        bound = []
        for index, (one, offset) in enumerate(zip(trained, parameter_offsets(self.plan), strict=True)):
            gradient = parameter_view(self._gradients, offset, one.parameter)
            leaving = parameter_view(self._memory.gradients, offset, one.parameter)
            value = parameter_view(self._memory.parameters, offset, one.parameter)
            # Weights in another memory format (channels_last) keep it: kernels are chosen by it.
            apart = self._own_copy or not one.parameter.is_contiguous()
            local = one.parameter.data if apart else value
            # A separate tensor, or all gradients would share the arena's version counter.
            bound.append(Bound(one, index, gradient.data, leaving, value, tuple(buckets[index]), local))
        return bound

    def _let_values_leave(self) -> None:
        """Copy the model's values to where gradients are sent from."""
        with torch.no_grad():
            for bound in self._bound:
                bound.leaving.copy_(bound.trained.parameter)

    def start(self) -> None:
        """Block until the parameters of the first step have arrived, and make the model use them."""
        self.step = self._memory.wait(max(self._node.start_step, 0)) - 1
        for bound in self._bound:
            bound.trained.parameter.data = bound.local
        self._use_new_values()

    def _use_new_values(self) -> None:
        lent = self._memory.newest([b.value for b in self._bound])
        if self._apart:
            values = [b.value if lent is None else lent[b.index] for b in self._apart]
            with torch.no_grad():
                torch._foreach_copy_([b.local for b in self._apart], values)
        if lent is not None and len(self._apart) < len(self._bound):
            # About 0.3 us per parameter; a copy of the whole model costs hundreds of times as much.
            for bound, value in zip(self._bound, lent, strict=True):
                if bound.local is bound.value:
                    bound.trained.parameter.data = value
        self._memory.release_former()

    def gpu_idle(self) -> float | None:
        """Seconds per step in which the GPU waited for parameters; None without a GPU."""
        return self._memory.idle.usual() if isinstance(self._memory, CudaMemory) else None

    def close(self) -> None:
        """Release the model and the arenas; the parameters keep their last values."""
        for bound in self._bound:
            parameter = bound.trained.parameter
            parameter.data = parameter.data.clone()
            if is_in(parameter.grad, bound.gradient):
                parameter.grad = bound.gradient.clone()
        self._memory.close()


def is_in(gradient: Tensor | None, place: Tensor) -> bool:
    """Whether this gradient uses exactly that memory; it may be another object, or the same one moved away."""
    if gradient is None or (gradient.layout, gradient.dtype, gradient.device) != (
        place.layout,
        place.dtype,
        place.device,
    ):
        return False
    return gradient.is_set_to(place)


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
