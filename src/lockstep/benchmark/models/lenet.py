"""LeNet-5 in the form of the old MNIST tutorials: two convolutions, two fully connected layers.

LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition (1998).
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.layers import conv_relu, linear, linear_relu


def lenet(num_classes: int) -> nn.Sequential:
    """For images of 28 x 28 in colour."""
    return nn.Sequential(
        conv_relu(3, 32, 5),
        nn.MaxPool2d(2),
        conv_relu(32, 64, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        linear_relu(64 * 7 * 7, 512),
        linear(512, num_classes),
    )
