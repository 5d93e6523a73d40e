"""A linear layer whose output and gradients oneDNN computes instead of MKL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lockstep.training.torch_private import onednn_product

_PIECE = 512 * 1024
"""Numbers of a weight's gradient that are made at once where they are copied: they stay in the cache."""
_LEAST_ROWS = 16


class OneDnnLinear(nn.Linear):
    """Computes plain matrices in full precision; all else as ``nn.Linear`` does."""

    def forward(self, given: Tensor) -> Tensor:
        if given.dim() != 2 or given.dtype != torch.float32 or torch.is_autocast_enabled(given.device.type):
            return super().forward(given)
        result: Tensor = _Product.apply(given, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        return onednn_product(given, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        given, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        return (
            input_gradient(output_gradient, weight, by_onednn=True) if for_input else None,
            weight_gradient(output_gradient, given, by_onednn=True) if for_weight else None,
            output_gradient.sum(0) if for_bias else None,
        )


def output_of(given: Tensor, weight: Tensor, bias: Tensor | None, *, by_onednn: bool) -> Tensor:
    return onednn_product(given, weight, bias) if by_onednn else functional.linear(given, weight, bias)


def input_gradient(output_gradient: Tensor, weight: Tensor, *, by_onednn: bool) -> Tensor:
    return onednn_product(output_gradient, weight.t(), None) if by_onednn else output_gradient.mm(weight)


def weight_gradient(output_gradient: Tensor, given: Tensor, *, by_onednn: bool) -> Tensor:
    """With the bits of ``write_weight_gradient``: the first step of each incarnation makes it with this."""
    if not by_onednn:
        return output_gradient.t().mm(given)
    made = given.new_empty(output_gradient.shape[1], given.shape[1])
    write_weight_gradient(output_gradient, given, made, by_onednn=True)
    return made


def write_weight_gradient(output_gradient: Tensor, given: Tensor, target: Tensor, *, by_onednn: bool) -> None:
    """oneDNN cannot write elsewhere than in memory of its own; made and copied in pieces, it is faster still."""
    if not by_onednn:
        torch.mm(output_gradient.t(), given, out=target)
        return
    rows = max(_PIECE // given.shape[1], _LEAST_ROWS)
    for first in range(0, len(target), rows):
        part = slice(first, first + rows)
        target[part].copy_(onednn_product(output_gradient[:, part].t(), given.t(), None))
