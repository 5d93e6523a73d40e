"""Weight gradients of linear layers, computed directly into the bucket that carries them.

Autograd would allocate a gradient, and a hook would copy it into the arena: two passes over memory for the largest
parameters of a model. Here the product is written where it is sent from, by the same calls with the same operands as
the layer's own, so the bits are the same.

A layer is handled this way only if its weight is used exactly once per step. The layer's first step, which goes through
autograd, shows that; anything unusual later (a second call, another use) goes through autograd again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.training.onednn_linear import (
    OneDnnLinear,
    input_gradient,
    output_of,
    weight_gradient,
    write_weight_gradient,
)
from lockstep.training.torch_private import has_gradient_hooks
from lockstep.training.worker.binding import Bound

OnWritten = Callable[[Bound], None]
"""Called when a parameter's gradient was written into its place in the arena."""


class DirectLinear:
    """One ``nn.Linear`` whose gradients go directly into the arena; ``restore`` puts its own ``forward`` back."""

    def __init__(self, module: nn.Linear, weight: Bound, bias: Bound | None, on_written: OnWritten) -> None:
        self.weight = weight
        self.bias = bias
        self.by_onednn = type(module) is OneDnnLinear
        self._module = module
        self._on_written = on_written
        self._uses = 0
        """Calls whose backward is still possible."""
        self._trial: dict[int, Tensor] = {}
        """The first step's gradients, by parameter; its whole gradient must be the same numbers."""
        self._proven: bool | None = None
        """Whether this layer is the only source of its parameters' gradients; None until known."""
        self._plain = module.forward
        module.forward = self._forward  # type: ignore[assignment, method-assign]  # an attribute of the instance: reversible

    def restore(self) -> None:
        if self._module.__dict__.get("forward") == self._forward:
            del self._module.forward

    def begin_step(self) -> None:
        self._uses = 0

    def judge(self, bound: Bound, gradient: Tensor) -> None:
        """A whole gradient came from autograd: in the first step it shows whether the layer was its only source."""
        expected = self._trial.pop(bound.index, None)
        if expected is not None:
            self._proven = self._proven is not False and torch.equal(gradient, expected)

    def _forward(self, given: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._plain(given)
        if given.dim() != 2 or torch.is_autocast_enabled(given.device.type):
            self._uses += 2  # never mix what autograd does itself with what is written here
            return self._plain(given)
        self._uses += 1
        result: Tensor = _Linear.apply(given, self._module.weight, self._module.bias, self)  # type: ignore[no-untyped-call]
        return result

    def keeps(self, weight: Tensor) -> bool:
        """Whether this weight can still be read after its gradient was sent, which can then happen sooner.

        It can if a server lends its own memory: the next version arrives in another place. Not on a GPU, where
        copies are queued behind the gradient.
        """
        return weight.device.type == "cpu" and weight.data_ptr() != self.weight.value.data_ptr()

    def take(self, output_gradient: Tensor, given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Backward has reached this layer: the gradients for autograd to add up, or None if they were written."""
        if not self._proven or self._uses != 1:
            return self._plain_gradients(output_gradient, given)
        write_weight_gradient(output_gradient, given, self.weight.gradient, by_onednn=self.by_onednn)
        self._on_written(self.weight)
        if self.bias is not None:
            torch.sum(output_gradient, 0, out=self.bias.gradient)
            self._on_written(self.bias)
        return None, None

    def _plain_gradients(self, output_gradient: Tensor, given: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = weight_gradient(output_gradient, given, by_onednn=self.by_onednn)
        bias = None if self.bias is None else output_gradient.sum(0)
        if self._proven is None and self._uses == 1:
            self._trial = {self.weight.index: weight}
            if self.bias is not None and bias is not None:
                self._trial[self.bias.index] = bias
        return weight, bias


class _Linear(torch.autograd.Function):
    """``functional.linear`` for a matrix, with a backward in which the layer decides where its gradients go."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, layer: DirectLinear) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.layer = layer
        return output_of(given, weight, bias, by_onednn=layer.by_onednn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        given, weight = ctx.saved_tensors
        layer, needs_input, for_input = ctx.layer, ctx.needs_input_grad[0], None
        sends_first = layer.keeps(weight)
        if needs_input and not sends_first:  # once its gradient is sent, the next version may arrive in its place
            for_input = input_gradient(output_gradient, weight, by_onednn=layer.by_onednn)
        for_weight, for_bias = layer.take(output_gradient, given)
        if needs_input and sends_first:
            for_input = input_gradient(output_gradient, weight, by_onednn=layer.by_onednn)
        return for_input, for_weight, for_bias, None


def direct_linears(model: nn.Module, bound: Sequence[Bound], on_written: OnWritten) -> list[DirectLinear]:
    """Replace the linear layers of a model whose parameters are all trained and belong to only one module."""
    by_parameter = {id(one.trained.parameter): one for one in bound}
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found = []
    for module in model.modules():
        if not isinstance(module, nn.Linear) or not _is_plain(module):
            continue
        mine = [module.weight] if module.bias is None else [module.weight, module.bias]
        places = [by_parameter[id(p)] for p in mine if id(p) in by_parameter and owners[id(p)] == 1]
        if len(places) == len(mine):
            found.append(DirectLinear(module, places[0], places[1] if len(places) > 1 else None, on_written))
    return found


def _is_plain(module: nn.Linear) -> bool:
    """Whether its arithmetic is known, and there is no user hook that autograd would call with the gradient of the
    weight."""
    if type(module) not in (nn.Linear, OneDnnLinear) or "forward" in module.__dict__:
        return False
    return not any(has_gradient_hooks(p) for p in module.parameters(recurse=False))
