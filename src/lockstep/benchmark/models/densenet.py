"""DenseNet for CIFAR-10, without bottlenecks and compression.

Huang, Liu, van der Maaten, Weinberger: Densely connected convolutional networks (arXiv:1608.06993). As in the
original's benchmark, convolutions have a bias and a ReLU follows the convolution between two blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lockstep.benchmark.models.layers import SpatialMean, batch_norm, conv, linear


class _DenseLayer(nn.Module):
    """Adds ``growth`` channels to those that come in."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            batch_norm(inputs),
            nn.ReLU(inplace=True),
            conv(inputs, growth, 3, bias=0.0, deviation=math.sqrt(2 / 9 / growth)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return torch.cat([pictures, self.layers(pictures)], dim=1)


def densenet(num_classes: int, depth: int, growth: int) -> nn.Sequential:
    """For images of 32 x 32: three blocks of (depth - 4) / 3 layers."""
    layers: list[nn.Module] = [conv(3, 16, 3, bias=0.0)]
    channels = 16
    for block in range(3):
        if block > 0:
            layers.append(_transition(channels))
        for _ in range((depth - 4) // 3):
            layers.append(_DenseLayer(channels, growth))
            channels += growth
    return nn.Sequential(
        *layers, batch_norm(channels), nn.ReLU(inplace=True), SpatialMean(), linear(channels, num_classes)
    )


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        batch_norm(channels),
        nn.ReLU(inplace=True),
        conv(channels, channels, 1, bias=0.0, deviation=math.sqrt(2 / 9 / channels)),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
    )
