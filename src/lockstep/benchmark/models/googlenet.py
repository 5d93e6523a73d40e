"""GoogLeNet (Inception v1), without auxiliary heads and response normalisation, as in tf_cnn_benchmarks.

Szegedy and others: Going deeper with convolutions (arXiv:1409.4842).
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.layers import Branches, SpatialMean, conv_relu, linear

_BLOCKS_BY_STAGE = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Channels of each block as in table 1 of the paper: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, after the pool."""


def googlenet(num_classes: int) -> nn.Sequential:
    """For images of 224 x 224."""
    layers: list[nn.Module] = [
        conv_relu(3, 64, 7, stride=2),
        _halving_pool(),
        conv_relu(64, 64, 1),
        conv_relu(64, 192, 3),
    ]
    inputs = 192
    for stage in _BLOCKS_BY_STAGE:
        layers.append(_halving_pool())
        for channels in stage:
            layers.append(_block(inputs, channels))
            inputs = channels[0] + channels[2] + channels[4] + channels[5]
    return nn.Sequential(*layers, SpatialMean(), linear(inputs, num_classes))


def _halving_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _block(inputs: int, channels: tuple[int, int, int, int, int, int]) -> Branches:
    one, reduce_three, three, reduce_five, five, after_pool = channels
    return Branches(
        [
            conv_relu(inputs, one, 1),
            nn.Sequential(conv_relu(inputs, reduce_three, 1), conv_relu(reduce_three, three, 3)),
            nn.Sequential(conv_relu(inputs, reduce_five, 1), conv_relu(reduce_five, five, 5)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_relu(inputs, after_pool, 1)),
        ]
    )
