"""One worker's model if nothing edits gradients after backward: buckets are sent as they fill, and applied eagerly.

Points 2 and 8 of "The life of a gradient" (ARCHITECTURE.md) happen here. Python's work is one short hook per parameter
and, per bucket, one copy and one event. Gradients of linear layers are not copied at all (``direct_linear.py``). The
next forward may begin while parameters of later layers are still in transit (``layer_waits.py``): after ``end`` the
model must not be used except for its forward, until ``settle`` has waited for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.protocol.coordinator.recovery import LossPolicy
from lockstep.protocol.core.ids import CHIEF, BucketId, Step
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.binding import ArenaMemory, Binding, BindingOptions, Bound, Trained
from lockstep.training.worker.direct_linear import DirectLinear, direct_linears
from lockstep.training.worker.host_memory import HostMemory
from lockstep.training.worker.layer_waits import LayerWaits
from lockstep.training.worker.local_state import TakenState

__all__ = ["ArenaMemory", "Copies", "Replica", "Trained"]


@dataclass(slots=True)
class Copies:
    """What was copied between autograd and the transport, and back, since counting began."""

    steps: int = 0
    gradients_in_place: int = 0
    """Gradients that were computed where they are sent from, and their bytes."""
    bytes_in_place: int = 0
    gradients_copied: int = 0
    bytes_copied: int = 0
    parameter_bytes_copied: int = 0
    """Bytes of new parameters that were copied into the model's own memory."""

    def sentence(self) -> str:
        """The copies per step, for people."""
        steps = max(1, self.steps)
        mega = 1e6 * steps
        return (
            f"copies per step: {self.gradients_in_place / steps:.0f} gradients ({self.bytes_in_place / mega:.1f} MB) "
            f"computed in place, {self.gradients_copied / steps:.0f} ({self.bytes_copied / mega:.1f} MB) copied once, "
            f"{self.parameter_bytes_copied / mega:.1f} MB of parameters copied"
        )


@dataclass(slots=True)
class _Filling:
    """A bucket during backward: which gradients it still lacks, and the copies to make when it is complete."""

    members: int
    lacking: int
    filled_in: Step = -1
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)


class Replica(Binding):
    """The model of one benchmark worker."""

    def __init__(
        self,
        node: WorkerNode,
        trained: Sequence[Trained],
        optimizers: tuple[OptimizerEntry, ...],
        bucket_bytes: int,
        *,
        own_copy: bool,
        model: nn.Module | None = None,
        wire: WireFormat | None = None,
        local_state: Callable[[], TakenState] | None = None,
        layers: nn.Module | None = None,
    ) -> None:
        """``own_copy``: the model keeps its own memory and copies each version (``distributed_replicated``); otherwise
        it reads parameters where they arrive (``parameter_server``). ``model``: whose linear layers are replaced.
        ``wire``: the format in which gradients are sent, if not as they are. ``local_state``: what this worker's next
        incarnation would need besides the parameters, requested after each backward. ``layers``: whose forward waits
        layer by layer, if the parameters are in host memory and every step is made with this worker.
        """
        options = BindingOptions(bucket_bytes=bucket_bytes, own_copy=own_copy, in_place=True, wire=wire or WireFormat())
        super().__init__(node, trained, optimizers, options)
        self._fillings = [_Filling(len(bucket.pieces), len(bucket.pieces)) for bucket in self.plan.buckets]
        self.copies = Copies()
        self._values = [bound.value for bound in self._bound]
        self._bytes_apart = sum(bound.value.nbytes for bound in self._bound if bound.local is not bound.value)
        self._direct = [] if model is None else direct_linears(model, self._bound, self._on_written)
        self._layers: dict[int, DirectLinear] = {
            bound.index: layer for layer in self._direct for bound in (layer.weight, layer.bias) if bound is not None
        }
        self._handles = self._hook()
        self._local_state = local_state if node.keeps_state else None
        self._awaited: int | None = None
        """The version of which the model does not have all parameters yet."""
        self._told: tuple[Step, tuple[GroupRates, ...]] | None = None
        """The step that has begun; the node is notified of it when all its parameters have arrived."""
        self._taken: set[int] = set()
        """Parameters that have the awaited version."""
        self._layer_waits: LayerWaits | None = None
        every_step = node.config.synchronous and node.config.aggregate is None
        if layers is not None and every_step and isinstance(self._memory, HostMemory):
            self._layer_waits = LayerWaits(layers, self._bound, self._need, self.settle)

    # -- a step, as the training loop calls it --

    def begin(self, step: Step, rates: tuple[GroupRates, ...]) -> None:
        """Forward of ``step`` is about to begin. Only the chief's ``rates`` count, if every step needs the chief."""
        self.step = step
        for layer in self._direct:
            layer.begin_step()
        told = self._node.task == CHIEF or self._node.config.recovery.on_worker_loss is LossPolicy.SHRINK
        said = rates if told else ()
        if self._awaited is not None and self._node.has_version(self._awaited):
            self.settle()
        if self._awaited is None:
            self._node.begin_step(step, said, in_order=self._memory.in_order)
        else:
            self._told = (step, said)
            self._node.enter_step(step)
        if self._layer_waits is not None:
            self._layer_waits.begin()

    def end(self) -> None:
        """Backward has ended: seal the step. Block until the next version has arrived, or leave that to its forward."""
        step, absent = self.step, self._close_unfilled()
        state = _no_state if self._local_state is None else self._local_state()
        # Not before the last gradient was passed on: in an incarnation's first step the seal requests the next version.
        # With a GPU, another thread waits for the state, while this one queues the next step.
        self._memory.after_filled(lambda: self._node.seal(step, absent, state=state()))
        self._awaited = self.step + 1
        if self._layer_waits is None or not self._layer_waits.learned:
            self.settle()

    def settle(self) -> None:
        """Block until the model has all parameters of the step that is next or has begun."""
        if self._awaited is None:
            return
        if self._told is None:
            self._memory.wait(self._awaited)
        else:
            self._node.wait_buckets(self._awaited, range(len(self.plan.buckets)))
        self._use_new_values()
        self._awaited = None
        self._taken.clear()
        self.copies.steps += 1
        self.copies.parameter_bytes_copied += self._bytes_apart
        if self._told is not None:
            # Only now: this also requests the version after this one, and only one version is awaited at a time.
            begun, self._told = self._told, None
            self._node.tell_begun(*begun)

    def _need(self, some: Sequence[Bound]) -> None:
        """Forward has reached a layer with these parameters."""
        if self._awaited is None:
            return
        if self._node.has_version(self._awaited):
            self.settle()
            return
        memory = self._memory
        assert isinstance(memory, HostMemory)
        new = [bound for bound in some if bound.index not in self._taken]
        self._node.wait_buckets(self._awaited, [bucket for bound in new for bucket in bound.buckets])
        self._taken.update(bound.index for bound in new)
        for bound, value in zip(new, memory.take([bound.index for bound in new], self._values), strict=True):
            if bound.local is bound.value:
                bound.trained.parameter.data = value
            else:
                with torch.no_grad():
                    bound.local.copy_(value)

    def memory(self) -> dict[str, int]:
        """Bytes of parameters in the model's own memory, besides those that the transport knows."""
        return {"copies of its own": self._bytes_apart}

    def close(self) -> None:
        if self._layer_waits is not None:
            self._layer_waits.close()
            self._layer_waits = None
        for layer in self._direct:
            layer.restore()
        for handle in self._handles:
            handle.remove()
        super().close()

    # -- hooks, during backward --

    def _hook(self) -> list[RemovableHandle]:
        def hook_for(bound: Bound) -> RemovableHandle:
            handle: RemovableHandle = bound.trained.parameter.register_post_accumulate_grad_hook(
                lambda _: self._on_gradient(bound)
            )
            return handle

        return [hook_for(bound) for bound in self._bound]

    def _on_gradient(self, bound: Bound) -> None:
        gradient = bound.trained.parameter.grad
        if gradient is None:
            return  # it was computed in place; autograd calls the hook anyway
        bound.trained.parameter.grad = None
        if bound.got_in == self.step:
            raise RuntimeError(
                f"{bound.trained.name} got a second gradient in step {self.step}; each parameter may be used by only "
                "one layer, the same in every step"
            )
        if (layer := self._layers.get(bound.index)) is not None:
            layer.judge(bound, gradient)
        self.copies.gradients_copied += 1
        self.copies.bytes_copied += gradient.nbytes
        if len(bound.buckets) > 1:
            # A large parameter fills several buckets by itself; it shares at most the last one with others.
            with torch.no_grad():
                bound.gradient.copy_(gradient)
        else:
            filling = self._fillings[bound.buckets[0]]
            flat = gradient.is_cuda and gradient.is_contiguous()
            # As flat rows, all of them are copied by one kernel; with their own strides it would be one kernel each.
            filling.targets.append(bound.gradient.view(-1) if flat else bound.gradient)
            filling.sources.append(gradient.view(-1) if flat else gradient)
        self._one_more(bound)

    def _on_written(self, bound: Bound) -> None:
        """This gradient is already in its place."""
        self.copies.gradients_in_place += 1
        self.copies.bytes_in_place += bound.gradient.nbytes
        self._one_more(bound)

    def _one_more(self, bound: Bound) -> None:
        bound.got_in = self.step
        if self._layer_waits is not None and not self._layer_waits.was_waited_for(bound):
            raise RuntimeError(
                f"{bound.trained.name} was used in step {self.step} without calling the layer that it belongs to, "
                "unlike in the first step; each parameter must be used in the same way in every step"
            )
        for bucket in bound.buckets:
            filling = self._fillings[bucket]
            filling.lacking -= 1
            if not filling.lacking:
                self._fill(bucket, filling)

    def _fill(self, bucket: BucketId, filling: _Filling) -> None:
        if filling.targets:
            with torch.no_grad():
                _copy(filling.targets, filling.sources)
            filling.targets.clear()
            filling.sources.clear()
        filling.lacking = filling.members
        filling.filled_in = self.step
        self._memory.filled(self.step, bucket)

    def _close_unfilled(self) -> tuple[BucketId, ...]:
        """Buckets that backward did not fill: without any gradient they are absent; otherwise the rest is zero."""
        absent = []
        for bucket, filling in enumerate(self._fillings):
            if filling.filled_in == self.step:
                continue
            if filling.lacking == filling.members:
                absent.append(bucket)
            else:
                self._zero_lacking(bucket)
                self._fill(bucket, filling)
        return tuple(absent)

    def _zero_lacking(self, bucket: BucketId) -> None:
        for piece in self.plan.buckets[bucket].pieces:
            bound = self._bound[piece.parameter]
            if bound.got_in != self.step:
                bound.gradient.zero_()


def _no_state() -> bytes:
    return b""


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    flat = [number for number, target in enumerate(targets) if target.dim() == 1]
    if not sources[0].is_cuda or len(flat) == len(targets):
        torch._foreach_copy_(targets, sources)
        return
    # One tensor of another shape would make the call slow for all of them.
    if flat:
        torch._foreach_copy_([targets[number] for number in flat], [sources[number] for number in flat])
    for target, source in zip(targets, sources, strict=True):
        if target.dim() != 1:
            target.copy_(source)
