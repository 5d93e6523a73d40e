"""One worker's model if a gradient is final when backward has made it: buckets are sent as they fill.

Points 2 and 8 of "The life of a gradient" (ARCHITECTURE.md) happen here. Python's work is one short hook per parameter
and, per bucket, one copy and one event. Gradients of linear layers are not copied at all (``direct_linear.py``). The
next forward may begin while parameters of later layers are still in transit (``arrivals.py``); ``settle`` waits for
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.protocol.coordinator.recovery import LossPolicy
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.arrivals import Arrivals
from lockstep.training.worker.binding import Binding, BindingOptions, Bound, Trained
from lockstep.training.worker.direct_linear import DirectLinear, direct_linears
from lockstep.training.worker.fillings import Fillings
from lockstep.training.worker.local_state import TakenState

__all__ = ["Copies", "Replica", "Trained"]


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


class Replica:
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
        self._binding = Binding(node, trained, optimizers, options)
        self.plan = self._binding.plan
        self.copies = Copies()
        self._node = node
        self._direct = [] if model is None else direct_linears(model, self._binding.bound, self._on_written)
        self._layers: dict[int, DirectLinear] = {
            bound.index: layer for layer in self._direct for bound in (layer.weight, layer.bias) if bound is not None
        }
        self._fillings = Fillings(self._binding, self._on_gradient)
        self._arrivals = Arrivals(self._binding, [] if layers is None else [layers])
        self._local_state = local_state if node.keeps_state else None

    # -- a step, as the training loop calls it --

    def start(self) -> None:
        """Block until the parameters of the first step are in the model."""
        self._binding.start()

    def begin(self, step: Step, rates: tuple[GroupRates, ...]) -> None:
        """Forward of ``step`` is about to begin. Only the chief's ``rates`` count, if every step needs the chief."""
        self._fillings.begin(step)
        for layer in self._direct:
            layer.begin_step()
        told = self._node.task == CHIEF or self._node.config.recovery.on_worker_loss is LossPolicy.SHRINK
        self._arrivals.begin(step, rates if told else ())

    def end(self) -> None:
        """Backward has ended: seal the step. Block until the next version has arrived, or leave that to its forward."""
        self._arrivals.settle()
        step, absent = self._fillings.step, self._fillings.close_unfilled()
        state = _no_state if self._local_state is None else self._local_state()
        # Not before the last gradient was passed on: in an incarnation's first step the seal requests the next version.
        # With a GPU, another thread waits for the state, while this one queues the next step.
        self._binding.memory.after_filled(lambda: self._node.seal(step, absent, state=state()))
        self.copies.steps += 1
        self.copies.parameter_bytes_copied += self._binding.bytes_apart
        self._arrivals.expect(step + 1)

    def settle(self) -> None:
        """Block until the model has all parameters of the step that is next or has begun."""
        self._arrivals.settle()

    def memory(self) -> dict[str, int]:
        """Bytes of parameters in the model's own memory, besides those that the transport knows."""
        return {"copies of its own": self._binding.bytes_apart}

    def gpu_idle(self) -> float | None:
        """Seconds per step in which the GPU waited for parameters; None without a GPU."""
        return self._binding.gpu_idle()

    def close(self) -> None:
        """Release the model; its parameters keep their last values."""
        self._arrivals.close()
        for layer in self._direct:
            layer.restore()
        self._fillings.close()
        self._binding.close()

    # -- hooks, during backward --

    def _on_gradient(self, bound: Bound) -> None:
        gradient = bound.trained.parameter.grad
        if gradient is None:
            return  # it was computed in place; autograd calls the hook anyway
        self._arrivals.settle()
        bound.trained.parameter.grad = None
        if self._fillings.has(bound):
            raise RuntimeError(
                f"{bound.trained.name} got a second gradient in step {self._fillings.step}; each parameter may be used "
                "by only one layer, the same in every step"
            )
        if (layer := self._layers.get(bound.index)) is not None:
            layer.judge(bound, gradient)
        self.copies.gradients_copied += 1
        self.copies.bytes_copied += gradient.nbytes
        for filling in self._fillings.add(bound, gradient):
            self._fillings.fill(filling)

    def _on_written(self, bound: Bound) -> None:
        """This gradient is already in its place."""
        self._arrivals.settle()
        self.copies.gradients_in_place += 1
        self.copies.bytes_in_place += bound.gradient.nbytes
        for filling in self._fillings.written(bound):
            self._fillings.fill(filling)


def _no_state() -> bytes:
    return b""
