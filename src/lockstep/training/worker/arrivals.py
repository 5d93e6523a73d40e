"""New values on their way into the model: all of them at the end of a step, or one by one under the next forward.

The next version is awaited from the moment a step is sealed. Where nothing prevents it, the training thread goes on at
once, and whatever uses a parameter waits for that one only (``layer_waits.py``). The step begins for the protocol when
all of its version is here: this also requests the version after it, and only one version is awaited at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.protocol.core.ids import Step
from lockstep.protocol.core.messages import GroupRates
from lockstep.training.worker.binding import Binding, Bound
from lockstep.training.worker.layer_waits import LayerWaits


class Arrivals:
    """The version that one worker's model has, and the one it gets next."""

    def __init__(self, binding: Binding, layers: Sequence[nn.Module]) -> None:
        """``layers``: the models that may wait layer by layer; they do if every step is made with this worker."""
        self._binding = binding
        self._node = binding.node
        self._awaited: int | None = None
        """The version of which the model does not have all parameters yet."""
        self._told: tuple[Step, tuple[GroupRates, ...]] | None = None
        """The step that has begun; the node is notified of it when all its parameters have arrived."""
        self._waits: LayerWaits | None = None
        config = self._node.config
        if layers and config.synchronous and config.aggregate is None:
            self._waits = LayerWaits(layers, binding.bound, self._need, self.settle)

    def expect(self, version: int, *, at_once: bool = False) -> int:
        """A step is sealed: the model gets this version, or a later one, which is returned.

        Blocks until all of it is here, unless whatever uses a parameter can wait for it. ``at_once``: blocks anyway.
        """
        self._awaited = version
        by_layer = not at_once and self._waits is not None and self._binding.memory.arrives_in_parts
        if by_layer and self._waits is not None and self._waits.begin():
            return version
        return self.settle()

    def begin(self, step: Step, rates: tuple[GroupRates, ...]) -> None:
        """The training thread is in this step, of which the version is here or awaited."""
        if self._awaited is not None and self._node.has_version(self._awaited):
            self.settle()
        if self._awaited is None:
            self._node.begin_step(step, rates, in_order=self._binding.memory.in_order)
        else:
            self._told = (step, rates)
            self._node.enter_step(step)

    def settle(self) -> int:
        """Block until the model has all parameters of the step that is next or has begun; returns their version."""
        reached = self._awaited
        if reached is not None:
            if self._told is None:
                reached = self._binding.memory.wait(reached)
            else:
                every = range(len(self._binding.plan.buckets))
                self._node.wait_buckets(reached, every)
                self._binding.memory.settle(reached, every)
        if self._waits is not None:
            self._waits.end()  # first: what follows touches parameters too
        if reached is None:
            return -1
        self._binding.use_all()
        self._awaited = None
        if self._told is not None:
            begun, self._told = self._told, None
            self._node.tell_begun(*begun)
        return reached

    def _need(self, some: Sequence[Bound]) -> None:
        """These parameters are about to be used."""
        if self._awaited is None or self._node.has_version(self._awaited):
            self.settle()
            return
        self._node.wait_buckets(self._awaited, [bucket for bound in some for bucket in bound.buckets])
        self._binding.use(some, self._awaited)

    def close(self) -> None:
        """Await nothing any more."""
        self._awaited, self._told = None, None
        if self._waits is not None:
            self._waits.close()
            self._waits = None
