"""OverFeat, the fast variant.

Sermanet, Eigen, Zhang, Mathieu, Fergus, LeCun: OverFeat: integrated recognition, localization and detection using
convolutional networks (arXiv:1312.6229).
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.layers import conv_relu, linear, linear_relu


def overfeat(num_classes: int) -> nn.Sequential:
    """For images of 231 x 231."""
    return nn.Sequential(
        conv_relu(3, 96, 11, stride=4, padding=0),
        nn.MaxPool2d(2),
        conv_relu(96, 256, 5, padding=0),
        nn.MaxPool2d(2),
        conv_relu(256, 512, 3),
        conv_relu(512, 1024, 3),
        conv_relu(1024, 1024, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        linear_relu(1024 * 6 * 6, 3072),
        nn.Dropout(0.5),
        linear_relu(3072, 4096),
        nn.Dropout(0.5),
        linear(4096, num_classes),
    )
