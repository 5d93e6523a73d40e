"""The cost of a model: its parameters, and the multiply-adds of one image's forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Cost:
    """Trainable elements, and multiply-adds of convolutions and fully connected layers for one image."""

    parameters: int
    multiply_adds: int


def measure(model: nn.Module, image_size: int, input_channels: int = 3) -> Cost:
    """Count on the model's device; on ``meta`` nothing is computed and no memory is allocated."""
    counted = 0

    def count(layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal counted
        if isinstance(layer, nn.Conv2d):
            counted += output.numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.Linear):
            counted += output.numel() * layer.in_features

    hooks = [
        layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.empty(1, input_channels, image_size, image_size, device=device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return Cost(sum(parameter.numel() for parameter in model.parameters()), counted)
