"""Layers initialised as in tf_cnn_benchmarks, made of plain torch.nn modules.

Every weight is drawn once, from torch's default generator, in the order in which layers are created: the same
seed gives the same model. Layers are created without torch's own initialisation, which would draw every weight
a second time.
Under ``with torch.device("meta")`` the layers take no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]

_TRUNCATED_DEVIATION = 0.87962566103423978
"""Standard deviation of a unit normal that is cut at -2 and 2; dividing by it restores the wanted one."""


def truncated_normal_(
    tensor: Tensor, deviation: float, mean: float = 0.0, generator: torch.Generator | None = None
) -> None:
    """Fill with a normal of this mean and deviation, cut at two deviations.

    Uses the inverse of the distribution: each number is drawn once, ten times faster than redrawing what falls
    outside (as ``nn.init.trunc_normal_`` does), which matters for models of a hundred million weights.
    """
    with torch.no_grad():
        reach = math.erf(math.sqrt(2.0))
        tensor.uniform_(-reach, reach, generator=generator).erfinv_()
        tensor.mul_(deviation * math.sqrt(2.0)).add_(mean)
        tensor.clamp_(mean - 2 * deviation, mean + 2 * deviation)


def _give_memory(layer: nn.Module) -> None:
    """Memory for a layer that was created without it. ``Module.to_empty`` does the same, but on its first call torch
    imports its symbolic shapes, and with them sympy: a second in which a rejoining worker keeps everyone waiting.
    """
    for name, parameter in layer.named_parameters(recurse=False):
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=torch.get_default_device())
        layer.register_parameter(name, nn.Parameter(empty))


def conv(
    inputs: int,
    outputs: int,
    kernel: Size,
    *,
    stride: int = 1,
    padding: Size | None = None,
    groups: int = 1,
    bias: float | None = None,
    deviation: float | None = None,
) -> nn.Conv2d:
    """A convolution.

    Args:
        inputs: input channels.
        outputs: output channels.
        kernel: a side or (height, width).
        stride: step in both directions.
        padding: None keeps the size of the image (at stride 1).
        groups: as in ``nn.Conv2d``.
        bias: its initial value; None for a convolution without bias.
        deviation: of the initial weights; None scales them so that the variance of the input is kept.
    """
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    if padding is None:
        padding = (height // 2, width // 2)
    layer = nn.Conv2d(
        inputs, outputs, (height, width), stride, padding, groups=groups, bias=bias is not None, device="meta"
    )
    _give_memory(layer)
    fan_in = inputs // groups * height * width
    truncated_normal_(layer.weight, deviation or math.sqrt(1.0 / fan_in) / _TRUNCATED_DEVIATION)
    if layer.bias is not None and bias is not None:
        nn.init.constant_(layer.bias, bias)
    return layer


def linear(
    inputs: int, outputs: int, *, before_relu: bool = False, bias: float = 0.0, deviation: float | None = None
) -> nn.Linear:
    """A fully connected layer; ``before_relu`` doubles the variance of its initial weights."""
    layer = nn.Linear(inputs, outputs, device="meta")
    _give_memory(layer)
    truncated_normal_(layer.weight, deviation or math.sqrt((2.0 if before_relu else 1.0) / inputs))
    nn.init.constant_(layer.bias, bias)
    return layer


def conv_relu(
    inputs: int,
    outputs: int,
    kernel: Size,
    *,
    stride: int = 1,
    padding: Size | None = None,
    bias: float = 0.0,
    deviation: float | None = None,
) -> nn.Sequential:
    """A convolution with bias, then ReLU: the unit of the networks from before batch normalisation."""
    layer = conv(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias, deviation=deviation)
    return nn.Sequential(layer, nn.ReLU(inplace=True))


def linear_relu(inputs: int, outputs: int, *, bias: float = 0.0, deviation: float | None = None) -> nn.Sequential:
    """A fully connected layer, then ReLU."""
    layer = linear(inputs, outputs, before_relu=True, bias=bias, deviation=deviation)
    return nn.Sequential(layer, nn.ReLU(inplace=True))


class CentringBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation with an offset but no learnt scale, as in tf_cnn_benchmarks' inception networks.

    The scale stays a constant 1 in a buffer, because the fast kernels need a tensor there.
    """

    def __init__(self, channels: int, eps: float, momentum: float) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        scale = self.weight.detach()
        del self.weight
        self.register_buffer("weight", scale, persistent=False)


def batch_norm(channels: int, *, epsilon: float = 1e-5, decay: float = 0.9, scale: bool = True) -> nn.BatchNorm2d:
    """Batch normalisation; ``decay`` is the fraction that the running statistics keep at each step."""
    if scale:
        return nn.BatchNorm2d(channels, eps=epsilon, momentum=1.0 - decay)
    return CentringBatchNorm2d(channels, eps=epsilon, momentum=1.0 - decay)


class Branches(nn.Module):
    """Several branches of a block, their outputs concatenated by channel."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, pictures: Tensor) -> Tensor:
        return torch.cat([branch(pictures) for branch in self.branches], dim=1)


class SpatialMean(nn.Module):
    """The mean over height and width, of shape (batch, channels)."""

    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.mean(dim=(2, 3))
