"""MobileNet v2.

Sandler, Howard, Zhu, Zhmoginov, Chen: MobileNetV2: inverted residuals and linear bottlenecks (arXiv:1801.04381).
"""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.benchmark.models.layers import SpatialMean, batch_norm, conv, linear

_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of the paper: expansion, output channels, blocks, stride of the first block."""


class InvertedResidual(nn.Module):
    """Widen, filter each channel separately, narrow again; with a shortcut if the shape allows it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        middle = inputs * expansion
        widen = [] if expansion == 1 else [_conv_norm(inputs, middle, 1), nn.ReLU6(inplace=True)]
        self.layers = nn.Sequential(
            *widen,
            _conv_norm(middle, middle, 3, stride=stride, groups=middle),
            nn.ReLU6(inplace=True),
            _conv_norm(middle, outputs, 1),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, pictures: Tensor) -> Tensor:
        outputs: Tensor = self.layers(pictures)
        return pictures + outputs if self.has_shortcut else outputs


def mobilenet(num_classes: int) -> nn.Sequential:
    """For images of 224 x 224 (any size of at least 32 works)."""
    layers: list[nn.Module] = [_conv_norm(3, 32, 3, stride=2), nn.ReLU6(inplace=True)]
    inputs = 32
    for expansion, outputs, count, first_stride in _STAGES:
        for index in range(count):
            layers.append(InvertedResidual(inputs, outputs, first_stride if index == 0 else 1, expansion))
            inputs = outputs
    return nn.Sequential(
        *layers,
        _conv_norm(inputs, 1280, 1),
        nn.ReLU6(inplace=True),
        SpatialMean(),
        nn.Dropout(0.2),
        linear(1280, num_classes),
    )


def _conv_norm(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        conv(inputs, outputs, kernel, stride=stride, groups=groups, deviation=0.09),
        batch_norm(outputs, epsilon=1e-3, decay=0.997),
    )
