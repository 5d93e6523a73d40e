"""Residual networks of 50, 101 and 152 layers for ImageNet, in three versions.

- v1: He, Zhang, Ren, Sun: Deep residual learning for image recognition (arXiv:1512.03385). A block that
  halves the image does so in its first 1 x 1 convolution.
- v1.5: the same, but the 3 x 3 convolution halves the image. It computes more and learns better.
- v2: the same authors: Identity mappings in deep residual networks (arXiv:1603.05027). Normalisation and ReLU
  come before each convolution, and nothing stands in the way of the identity.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from lockstep.benchmark.models.layers import SpatialMean, batch_norm, conv, linear

_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks in each of the four stages, by depth."""

_WIDENING = 4
"""A block's output has this many times the channels of its 3 x 3 convolution."""


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 and a shortcut around them (v1 and v1.5)."""

    def __init__(self, inputs: int, middle: int, stride: int, halve_in_first: bool) -> None:
        super().__init__()
        outputs = middle * _WIDENING
        first_stride, second_stride = (stride, 1) if halve_in_first else (1, stride)
        self.shortcut = (
            None if inputs == outputs else nn.Sequential(conv(inputs, outputs, 1, stride=stride), batch_norm(outputs))
        )
        self.residual = nn.Sequential(
            conv(inputs, middle, 1, stride=first_stride),
            batch_norm(middle),
            nn.ReLU(inplace=True),
            conv(middle, middle, 3, stride=second_stride),
            batch_norm(middle),
            nn.ReLU(inplace=True),
            conv(middle, outputs, 1),
            batch_norm(outputs),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        shortcut = pictures if self.shortcut is None else self.shortcut(pictures)
        total: Tensor = self.residual(pictures)
        total += shortcut
        return functional.relu_(total)


class PreactivatedBottleneck(nn.Module):
    """The block of v2; where the size changes, the shortcut starts after the first normalisation."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = middle * _WIDENING
        self.preactivation = nn.Sequential(batch_norm(inputs), nn.ReLU(inplace=True))
        self.shortcut = None if inputs == outputs else conv(inputs, outputs, 1, stride=stride)
        self.residual = nn.Sequential(
            conv(inputs, middle, 1, stride=stride),
            batch_norm(middle),
            nn.ReLU(inplace=True),
            conv(middle, middle, 3),
            batch_norm(middle),
            nn.ReLU(inplace=True),
            conv(middle, outputs, 1),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        ready = self.preactivation(pictures)
        shortcut = pictures if self.shortcut is None else self.shortcut(ready)
        return cast(Tensor, shortcut + self.residual(ready))


def resnet(num_classes: int, depth: int, version: str) -> nn.Sequential:
    """For images of 224 x 224 (any size of at least 32 works).

    Args:
        num_classes: length of the logits.
        depth: 50, 101 or 152.
        version: ``v1``, ``v1.5`` or ``v2``.
    """
    stem = [
        conv(3, 64, 7, stride=2),
        batch_norm(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(_BLOCKS[depth]):
        middle = 64 << stage
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(_block(inputs, middle, stride, version))
            inputs = middle * _WIDENING
    last = [batch_norm(inputs), nn.ReLU(inplace=True)] if version == "v2" else []
    return nn.Sequential(*stem, *blocks, *last, SpatialMean(), linear(inputs, num_classes))


def _block(inputs: int, middle: int, stride: int, version: str) -> nn.Module:
    if version == "v2":
        return PreactivatedBottleneck(inputs, middle, stride)
    return Bottleneck(inputs, middle, stride, halve_in_first=version == "v1")
