"""VGG with 11, 16 and 19 layers: configurations A, D and E of the paper.

Simonyan, Zisserman: Very deep convolutional networks for large-scale image recognition (arXiv:1409.1556).
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.layers import conv_relu, linear, linear_relu

_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions in each of the five stages, by depth."""


def vgg(num_classes: int, depth: int) -> nn.Sequential:
    """For images of 224 x 224."""
    layers: list[nn.Module] = []
    inputs = 3
    for count, outputs in zip(_CONVOLUTIONS[depth], (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers.append(conv_relu(inputs, outputs, 3))
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        linear_relu(512 * 7 * 7, 4096),
        nn.Dropout(0.5),
        linear_relu(4096, 4096),
        nn.Dropout(0.5),
        linear(4096, num_classes),
    )
