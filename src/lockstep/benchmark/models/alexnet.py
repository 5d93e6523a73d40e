"""AlexNet for ImageNet in its one-tower form, and the small relative of it for CIFAR-10.

Krizhevsky, Sutskever, Hinton: ImageNet classification with deep convolutional neural networks (2012); the
single tower is that of Krizhevsky: One weird trick for parallelizing convolutional neural networks (2014).
"""

from __future__ import annotations

from torch import nn

from lockstep.benchmark.models.layers import conv_relu, linear, linear_relu


def alexnet(num_classes: int) -> nn.Sequential:
    """For images of 227 x 227."""
    return nn.Sequential(
        conv_relu(3, 64, 11, stride=4, padding=0),
        nn.MaxPool2d(3, stride=2),
        conv_relu(64, 192, 5),
        nn.MaxPool2d(3, stride=2),
        conv_relu(192, 384, 3),
        conv_relu(384, 384, 3),
        conv_relu(384, 256, 3),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        linear_relu(256 * 6 * 6, 4096),
        nn.Dropout(0.5),
        linear_relu(4096, 4096),
        nn.Dropout(0.5),
        linear(4096, num_classes),
    )


def alexnet_cifar(num_classes: int) -> nn.Sequential:
    """For images of 32 x 32, with the local response normalisation of the CIFAR-10 tutorial."""
    return nn.Sequential(
        conv_relu(3, 64, 5, deviation=0.05),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        _response_norm(),
        conv_relu(64, 64, 5, bias=0.1, deviation=0.05),
        _response_norm(),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.Flatten(),
        linear_relu(64 * 8 * 8, 384, bias=0.1, deviation=0.04),
        linear_relu(384, 192, bias=0.1, deviation=0.04),
        linear(192, num_classes),
    )


def _response_norm() -> nn.LocalResponseNorm:
    # torch divides alpha by the nine channels of the window; the original writes 0.001 / 9 itself.
    return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
