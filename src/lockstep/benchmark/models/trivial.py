"""A network that does next to nothing, to measure everything except the network.

Its first layer squeezes the whole image into one number, so that steps cost little while four million
parameters are still exchanged.
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.layers import linear, linear_relu


def trivial(num_classes: int, side: int) -> nn.Sequential:
    """Flatten a square image, one neuron, 4096 neurons, classes."""
    return nn.Sequential(
        nn.Flatten(),
        linear_relu(side * side * 3, 1),
        linear_relu(1, 4096),
        linear(4096, num_classes),
    )
