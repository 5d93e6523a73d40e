"""Residual networks of 20 to 110 layers for CIFAR-10: section 4.2 of arXiv:1512.03385 (v1) and arXiv:1603.05027 (v2).

Where channels double, the shortcut takes every other pixel and pads with empty channels (option A of the
paper), so that it has no parameters.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from lockstep.benchmark.models.layers import SpatialMean, batch_norm, conv, linear


class Shortcut(nn.Module):
    """The identity, or every ``stride``-th pixel between empty channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, pictures: Tensor) -> Tensor:
        if self.padding == 0:
            return pictures
        strided = pictures[:, :, :: self.stride, :: self.stride]
        return functional.pad(strided, (0, 0, 0, 0, self.padding, self.padding))


class _Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut around them (v1)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.shortcut = Shortcut(inputs, outputs, stride)
        self.residual = nn.Sequential(
            conv(inputs, outputs, 3, stride=stride),
            batch_norm(outputs),
            nn.ReLU(inplace=True),
            conv(outputs, outputs, 3),
            batch_norm(outputs),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        total: Tensor = self.residual(pictures)
        total += self.shortcut(pictures)
        return functional.relu_(total)


class _PreactivatedBlock(nn.Module):
    """The same with normalisation and ReLU before each convolution (v2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.shortcut = Shortcut(inputs, outputs, stride)
        self.residual = nn.Sequential(
            batch_norm(inputs),
            nn.ReLU(inplace=True),
            conv(inputs, outputs, 3, stride=stride),
            batch_norm(outputs),
            nn.ReLU(inplace=True),
            conv(outputs, outputs, 3),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        total: Tensor = self.residual(pictures)
        total += self.shortcut(pictures)
        return total


def resnet_cifar(num_classes: int, depth: int, version: str) -> nn.Sequential:
    """For images of 32 x 32.

    Args:
        num_classes: length of the logits.
        depth: 6n + 2, that is n blocks in each of three stages.
        version: ``v1`` or ``v2``.
    """
    preactivated = version == "v2"
    block = _PreactivatedBlock if preactivated else _Block
    # The original leaves out the ReLU after the first convolution of v1, and keeps it in v2.
    stem = [conv(3, 16, 3), batch_norm(16), *([nn.ReLU(inplace=True)] if preactivated else [])]
    blocks: list[nn.Module] = []
    inputs = 16
    for outputs in (16, 32, 64):
        for index in range((depth - 2) // 6):
            stride = 2 if outputs > 16 and index == 0 else 1
            blocks.append(block(inputs, outputs, stride))
            inputs = outputs
    last = [batch_norm(64), nn.ReLU(inplace=True)] if preactivated else []
    return nn.Sequential(*stem, *blocks, *last, SpatialMean(), linear(64, num_classes))
