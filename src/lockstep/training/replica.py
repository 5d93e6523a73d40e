"""One worker's model where nothing edits gradients after backward: buckets leave as they fill, and are applied eagerly.

Rows 2 and 8 of the life of a gradient happen here. Python's work is one short hook a parameter and, for each bucket,
one copy and one event. Gradients of linear layers are not copied at all (``direct_linear.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.protocol.ids import CHIEF, BucketId, Step
from lockstep.protocol.messages import GroupRates, OptimizerEntry
from lockstep.protocol.recovery import LossPolicy
from lockstep.runtime.worker_node import WorkerNode
from lockstep.training.binding import Binding, BindingOptions, Bound, Memory, Trained
from lockstep.training.direct_linear import DirectLinear, direct_linears
from lockstep.training.local_state import TakenState
from lockstep.training.wire_format import WireFormat

__all__ = ["Copies", "Memory", "Replica", "Trained"]


@dataclass(slots=True)
class Copies:
    """What was copied between autograd and the transport, and back, since the counts began."""

    steps: int = 0
    gradients_in_place: int = 0
    """Gradients that were computed where they leave from, and their bytes."""
    bytes_in_place: int = 0
    gradients_copied: int = 0
    bytes_copied: int = 0
    parameter_bytes_copied: int = 0
    """Bytes of new parameters that were copied into memory of the model's own."""

    def sentence(self) -> str:
        """The copies of one step, for people."""
        steps = max(1, self.steps)
        mega = 1e6 * steps
        return (
            f"copies in a step: {self.gradients_in_place / steps:.0f} gradients ({self.bytes_in_place / mega:.1f} MB) "
            f"computed in place, {self.gradients_copied / steps:.0f} ({self.bytes_copied / mega:.1f} MB) copied once, "
            f"{self.parameter_bytes_copied / mega:.1f} MB of parameters copied"
        )


@dataclass(slots=True)
class _Filling:
    """A bucket while backward goes on: whose gradients it still lacks, and the copies to make when it is complete."""

    members: int
    lacking: int
    filled_in: Step = -1
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)


class Replica(Binding):
    """The model of one worker of the benchmark."""

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
    ) -> None:
        """``own_copy``: the model keeps memory of its own and copies each version (``distributed_replicated``); else it
        reads parameters where they arrive (``parameter_server``). ``model``: whose linear layers are taken over.
        ``wire``: how gradients travel, if not as they are. ``local_state``: what the next life of this worker would
        need beside the parameters, asked after each backward.
        """
        options = BindingOptions(bucket_bytes=bucket_bytes, own_copy=own_copy, in_place=True, wire=wire or WireFormat())
        super().__init__(node, trained, optimizers, options)
        self._fillings = [_Filling(len(bucket.pieces), len(bucket.pieces)) for bucket in self.plan.buckets]
        self.copies = Copies()
        self._bytes_apart = sum(bound.value.nbytes for bound in self._bound if bound.local is not bound.value)
        self._direct = [] if model is None else direct_linears(model, self._bound, self._on_written)
        self._layers: dict[int, DirectLinear] = {
            bound.index: layer for layer in self._direct for bound in (layer.weight, layer.bias) if bound is not None
        }
        self._handles = self._hook()
        self._local_state = local_state if node.keeps_state else None

    # -- a step, as the training loop calls it --

    def begin(self, step: Step, rates: tuple[GroupRates, ...]) -> None:
        """Forward of ``step`` is about to begin. ``rates`` count on the chief, unless the job may go on without it."""
        self.step = step
        for layer in self._direct:
            layer.begin_step()
        told = self._node.task == CHIEF or self._node.config.recovery.on_worker_loss is LossPolicy.SHRINK
        self._node.begin_step(step, rates if told else (), in_order=self._memory.in_order)

    def end(self) -> None:
        """Backward has ended: seal the step and block until the next version is here."""
        step, absent = self.step, self._close_unfilled()
        state = _no_state if self._local_state is None else self._local_state()
        # Not before the last gradient was handed on: in the first step of a life the seal asks for the next version.
        # With a GPU it is another thread that waits for the state, while this one queues the next step.
        self._memory.after_filled(lambda: self._node.seal(step, absent, state=state()))
        self._memory.wait(self.step + 1)
        self._use_new_values()
        self.copies.steps += 1
        self.copies.parameter_bytes_copied += self._bytes_apart

    def memory(self) -> dict[str, int]:
        """Bytes of parameters in memory of the model's own, beside those that the transport knows."""
        return {"copies of its own": self._bytes_apart}

    def close(self) -> None:
        for layer in self._direct:
            layer.restore()
        for handle in self._handles:
            handle.remove()
        super().close()

    # -- hooks, while backward goes on --

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
            return  # it was computed in its place; autograd calls the hook nevertheless
        bound.trained.parameter.grad = None
        if bound.got_in == self.step:
            raise RuntimeError(
                f"{bound.trained.name} got a second gradient in step {self.step}; every parameter may be used by one "
                "layer only, the same in every step"
            )
        if (layer := self._layers.get(bound.index)) is not None:
            layer.judge(bound, gradient)
        self.copies.gradients_copied += 1
        self.copies.bytes_copied += gradient.nbytes
        if len(bound.buckets) > 1:
            # A large parameter fills several buckets by itself; it shares at most the last with others.
            with torch.no_grad():
                bound.gradient.copy_(gradient)
        else:
            filling = self._fillings[bound.buckets[0]]
            flat = gradient.is_cuda and gradient.is_contiguous()
            # As flat rows all of them are copied by one kernel; with strides of their own it would be one for each.
            filling.targets.append(bound.gradient.view(-1) if flat else bound.gradient)
            filling.sources.append(gradient.view(-1) if flat else gradient)
        self._one_more(bound)

    def _on_written(self, bound: Bound) -> None:
        """This gradient is in its place already."""
        self.copies.gradients_in_place += 1
        self.copies.bytes_in_place += bound.gradient.nbytes
        self._one_more(bound)

    def _one_more(self, bound: Bound) -> None:
        bound.got_in = self.step
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
        """Buckets that backward did not fill: wholly without a gradient they are absent; else the rest is zero."""
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
    # One tensor of another shape would make the call for all of them a slow one.
    if flat:
        torch._foreach_copy_([targets[number] for number in flat], [sources[number] for number in flat])
    for target, source in zip(targets, sources, strict=True):
        if target.dim() != 1:
            target.copy_(source)
