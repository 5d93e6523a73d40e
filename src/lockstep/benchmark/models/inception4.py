"""Inception v4 for ImageNet.

Szegedy, Ioffe, Vanhoucke, Alemi: Inception-v4, Inception-ResNet and the impact of residual connections on
learning (arXiv:1602.07261). Sizes in comments are those of an image of 299 x 299.
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.inception3 import average_pool, conv_norm, halving_conv
from lockstep.benchmark.models.layers import Branches, SpatialMean, linear


def inception4(num_classes: int) -> nn.Sequential:
    """For images of 299 x 299."""
    return nn.Sequential(
        halving_conv(3, 32),  # 149 x 149
        conv_norm(32, 32, 3, padding=0),  # 147 x 147
        conv_norm(32, 64, 3),
        Branches([nn.MaxPool2d(3, stride=2), halving_conv(64, 96)]),  # 73 x 73
        _stem_tail(),  # 71 x 71
        Branches([halving_conv(192, 192), nn.MaxPool2d(3, stride=2)]),  # 35 x 35
        *(_block_a() for _ in range(4)),
        _reduction_a(),  # 17 x 17
        *(_block_b() for _ in range(7)),
        _reduction_b(),  # 8 x 8
        *(_block_c() for _ in range(3)),
        SpatialMean(),
        nn.Dropout(0.2),
        linear(1536, num_classes),
    )


def _stem_tail() -> Branches:
    return Branches(
        [
            nn.Sequential(conv_norm(160, 64, 1), conv_norm(64, 96, 3, padding=0)),
            nn.Sequential(
                conv_norm(160, 64, 1),
                conv_norm(64, 64, (7, 1)),
                conv_norm(64, 64, (1, 7)),
                conv_norm(64, 96, 3, padding=0),
            ),
        ]
    )


def _block_a() -> Branches:
    return Branches(
        [
            nn.Sequential(average_pool(), conv_norm(384, 96, 1)),
            conv_norm(384, 96, 1),
            nn.Sequential(conv_norm(384, 64, 1), conv_norm(64, 96, 3)),
            nn.Sequential(conv_norm(384, 64, 1), conv_norm(64, 96, 3), conv_norm(96, 96, 3)),
        ]
    )


def _reduction_a() -> Branches:
    return Branches(
        [
            nn.MaxPool2d(3, stride=2),
            halving_conv(384, 384),
            nn.Sequential(conv_norm(384, 192, 1), conv_norm(192, 224, 3), halving_conv(224, 256)),
        ]
    )


def _block_b() -> Branches:
    return Branches(
        [
            nn.Sequential(average_pool(), conv_norm(1024, 128, 1)),
            conv_norm(1024, 384, 1),
            nn.Sequential(conv_norm(1024, 192, 1), conv_norm(192, 224, (1, 7)), conv_norm(224, 256, (7, 1))),
            nn.Sequential(
                conv_norm(1024, 192, 1),
                conv_norm(192, 192, (1, 7)),
                conv_norm(192, 224, (7, 1)),
                conv_norm(224, 224, (1, 7)),
                conv_norm(224, 256, (7, 1)),
            ),
        ]
    )


def _reduction_b() -> Branches:
    return Branches(
        [
            nn.MaxPool2d(3, stride=2),
            nn.Sequential(conv_norm(1024, 192, 1), halving_conv(192, 192)),
            nn.Sequential(
                conv_norm(1024, 256, 1),
                conv_norm(256, 256, (1, 7)),
                conv_norm(256, 320, (7, 1)),
                halving_conv(320, 320),
            ),
        ]
    )


def _block_c() -> Branches:
    return Branches(
        [
            nn.Sequential(average_pool(), conv_norm(1536, 256, 1)),
            conv_norm(1536, 256, 1),
            nn.Sequential(conv_norm(1536, 384, 1), _row_and_column(384)),
            nn.Sequential(
                conv_norm(1536, 384, 1),
                conv_norm(384, 448, (1, 3)),
                conv_norm(448, 512, (3, 1)),
                _row_and_column(512),
            ),
        ]
    )


def _row_and_column(inputs: int) -> Branches:
    return Branches([conv_norm(inputs, 256, (1, 3)), conv_norm(inputs, 256, (3, 1))])
