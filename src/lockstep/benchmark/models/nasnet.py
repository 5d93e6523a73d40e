"""NASNet-A: the mobile and the large network for ImageNet, and the one for CIFAR-10.

Zoph, Vasudevan, Shlens, Le: Learning transferable architectures for scalable image recognition
(arXiv:1707.07012). A network is a sequence of cells. A cell takes the outputs of the two cells before it; a normal
cell keeps the size of the image, a reduction cell halves it. As in the original's benchmark there is
neither an auxiliary head nor dropout before the last layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.benchmark.models.layers import SpatialMean, batch_norm, conv, linear


@dataclass(frozen=True, slots=True)
class _Config:
    """One of the three networks.

    Attributes:
        cells: normal cells.
        filters: channels of the convolutions in the first of them; they double at each reduction.
        stem_filters: channels of the first convolution.
        halving_stem: whether the network starts with a strided convolution and two reduction cells.
        skip_reduction: whether the cell after a reduction looks back beyond the cell before the reduction.
        epsilon: of batch normalisation.
        decay: of its running statistics.
        keep_path: probability at the end of training that the last cell's operations are used for an image.
        training_steps: over which that probability falls from 1.
    """

    cells: int
    filters: int
    stem_filters: int
    halving_stem: bool
    skip_reduction: bool = False
    epsilon: float = 1e-3
    decay: float = 0.9997
    keep_path: float = 1.0
    training_steps: int = 250_000

    def norm(self, channels: int) -> nn.BatchNorm2d:
        return batch_norm(channels, epsilon=self.epsilon, decay=self.decay)


_MOBILE = _Config(cells=12, filters=44, stem_filters=32, halving_stem=True)
_LARGE = _Config(cells=18, filters=168, stem_filters=96, halving_stem=True, skip_reduction=True, keep_path=0.7)
_CIFAR = _Config(
    cells=18,
    filters=32,
    stem_filters=96,
    halving_stem=False,
    epsilon=1e-5,
    decay=0.9,
    keep_path=0.6,
    training_steps=937_500,
)


@dataclass(frozen=True, slots=True)
class _CellPlan:
    """What the search found: five sums of two operations each, and what leaves the cell.

    States 0 and 1 are the outputs of the last cell and of the one before it, states 2 to 6 the sums.
    An operation is (state, kind).
    """

    sums: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    outputs: tuple[int, ...]
    stride: int


_NORMAL = _CellPlan(
    sums=(
        ((0, "separable5"), (1, "separable3")),
        ((1, "separable5"), (1, "separable3")),
        ((0, "average"), (1, "identity")),
        ((1, "average"), (1, "average")),
        ((0, "separable3"), (0, "identity")),
    ),
    outputs=(1, 2, 3, 4, 5, 6),
    stride=1,
)
_REDUCTION = _CellPlan(
    sums=(
        ((0, "separable5"), (1, "separable7")),
        ((0, "maximum"), (1, "separable7")),
        ((0, "average"), (1, "separable5")),
        ((3, "identity"), (2, "average")),
        ((2, "separable3"), (0, "maximum")),
    ),
    outputs=(3, 4, 5, 6),
    stride=2,
)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a cell's output: its channels, and how often the image was halved."""

    channels: int
    halvings: int


class _FactorizedReduction(nn.Module):
    """Halves the image; half of the channels see the pixels that the other half skips."""

    def __init__(self, inputs: int, outputs: int, config: _Config) -> None:
        super().__init__()
        self.even = _conv(inputs, outputs // 2, 1)
        self.odd = _conv(inputs, outputs // 2, 1)
        self.norm = config.norm(outputs)

    def forward(self, pictures: Tensor) -> Tensor:
        shifted = functional.pad(pictures, (0, 1, 0, 1))[:, :, 1::2, 1::2]
        both = torch.cat([self.even(pictures[:, :, ::2, ::2]), self.odd(shifted)], dim=1)
        normalised: Tensor = self.norm(both)
        return normalised


class _Operation(nn.Module):
    """One operation of a cell; in training it may be left out for single images (drop path)."""

    def __init__(self, layers: nn.Module, keep_path: float) -> None:
        super().__init__()
        self.layers = layers
        self.keep_path = keep_path

    def forward(self, pictures: Tensor, progress: Tensor) -> Tensor:
        outputs: Tensor = self.layers(pictures)
        if self.keep_path == 1.0 or not self.training:
            return outputs
        keep = (1 - progress * (1 - self.keep_path)).to(outputs.dtype)
        chosen = torch.rand(len(outputs), 1, 1, 1, dtype=outputs.dtype, device=outputs.device).add(keep).floor()
        return outputs / keep * chosen


class _Cell(nn.Module):
    """One cell; ``shape`` is that of its output."""

    def __init__(
        self, last: _Shape, before: _Shape | None, filters: int, plan: _CellPlan, keep_path: float, config: _Config
    ) -> None:
        super().__init__()
        self.plan = plan
        self.squeeze = nn.Sequential(nn.ReLU(), _conv(last.channels, filters, 1), config.norm(filters))
        self.fit_before, before_channels = _fit_before(last, before, filters, config)
        channels = [filters, before_channels] + [filters] * len(plan.sums)
        self.operations = nn.ModuleList(
            _Operation(
                _layers_of(kind, channels[state], filters, plan.stride if state < 2 else 1, config),
                1.0 if kind == "identity" else keep_path,
            )
            for pair in plan.sums
            for state, kind in pair
        )
        # Only a first cell sees a state whose channels differ from its own.
        self.fit_output = (
            nn.Sequential(_conv(before_channels, filters, 1), config.norm(filters))
            if 1 in plan.outputs and before_channels != filters
            else None
        )
        self.shape = _Shape(len(plan.outputs) * filters, last.halvings + plan.stride - 1)

    def forward(self, last: Tensor, before: Tensor, progress: Tensor) -> Tensor:
        states: list[Tensor] = [self.squeeze(last), self.fit_before(before)]
        operations = iter(self.operations)
        for (left, _), (right, _) in self.plan.sums:
            states.append(next(operations)(states[left], progress) + next(operations)(states[right], progress))
        if self.fit_output is not None:
            states[1] = self.fit_output(states[1])
        return torch.cat([states[index] for index in self.plan.outputs], dim=1)


class NasNet(nn.Module):
    """The sequence of cells; counts its training steps, with which drop path grows stronger."""

    steps_taken: Tensor

    def __init__(self, num_classes: int, config: _Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("steps_taken", torch.zeros((), dtype=torch.int64))
        padding, stride = (0, 2) if config.halving_stem else (1, 1)
        self.stem = nn.Sequential(
            _conv(3, config.stem_filters, 3, stride=stride, padding=padding), config.norm(config.stem_filters)
        )
        plans = _plan_of_network(config)
        shapes = [_Shape(config.stem_filters, stride - 1)]
        cells: list[_Cell] = []
        for index, (plan, filters, back) in enumerate(plans):
            before = shapes[-back] if len(shapes) >= back else None
            keep_path = 1 - (index + 1) / len(plans) * (1 - config.keep_path)
            cells.append(_Cell(shapes[-1], before, filters, plan, keep_path, config))
            shapes.append(cells[-1].shape)
        self.cells = nn.ModuleList(cells)
        self.looks_back = [back for _, _, back in plans]
        self.classify = nn.Sequential(nn.ReLU(inplace=True), SpatialMean(), linear(shapes[-1].channels, num_classes))

    def forward(self, pictures: Tensor) -> Tensor:
        progress = (self.steps_taken / self.config.training_steps).clamp(max=1.0)
        if self.training:
            self.steps_taken += 1
        outputs: list[Tensor] = [self.stem(pictures)]
        for cell, back in zip(self.cells, self.looks_back, strict=True):
            before = outputs[-back] if len(outputs) >= back else outputs[-1]
            outputs.append(cell(outputs[-1], before, progress))
            del outputs[:-3]  # no cell looks back further
        logits: Tensor = self.classify(outputs[-1])
        return logits


def nasnet_mobile(num_classes: int) -> NasNet:
    """NASNet-A (4 @ 1056), for images of 224 x 224."""
    return NasNet(num_classes, _MOBILE)


def nasnet_large(num_classes: int) -> NasNet:
    """NASNet-A (6 @ 4032), for images of 331 x 331."""
    return NasNet(num_classes, _LARGE)


def nasnet_cifar(num_classes: int) -> NasNet:
    """NASNet-A (6 @ 768), for images of 32 x 32."""
    return NasNet(num_classes, _CIFAR)


def _plan_of_network(config: _Config) -> list[tuple[_CellPlan, int, int]]:
    """The cells in order: what each computes, its filters, and how far back its second input is."""
    plans: list[tuple[_CellPlan, int, int]] = []
    if config.halving_stem:
        plans += [(_REDUCTION, config.filters // 4, 2), (_REDUCTION, config.filters // 2, 2)]
    third = config.cells // 3
    for stage in range(3):
        filters = config.filters << stage
        if stage > 0:
            plans.append((_REDUCTION, filters, 2))
        for index in range(third):
            after_reduction = stage > 0 and index == 0
            plans.append((_NORMAL, filters, 3 if after_reduction and config.skip_reduction else 2))
    return plans


def _fit_before(last: _Shape, before: _Shape | None, filters: int, config: _Config) -> tuple[nn.Module, int]:
    """Layers that bring the second input to the first one's size, and their output channels."""
    if before is None:
        return nn.Identity(), last.channels
    if before.halvings != last.halvings:
        return nn.Sequential(nn.ReLU(), _FactorizedReduction(before.channels, filters, config)), filters
    if before.channels != filters:
        return nn.Sequential(nn.ReLU(), _conv(before.channels, filters, 1), config.norm(filters)), filters
    return nn.Identity(), filters


def _layers_of(kind: str, inputs: int, filters: int, stride: int, config: _Config) -> nn.Module:
    if kind.startswith("separable"):
        return _separable_twice(inputs, filters, int(kind.removeprefix("separable")), stride, config)
    if kind == "identity":
        if stride == 1 and inputs == filters:
            return nn.Identity()
        return nn.Sequential(nn.ReLU(), _conv(inputs, filters, 1, stride=stride), config.norm(filters))
    pool: nn.Module = (
        nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
        if kind == "average"
        else nn.MaxPool2d(3, stride=stride, padding=1)
    )
    if inputs == filters:
        return pool
    return nn.Sequential(pool, _conv(inputs, filters, 1), config.norm(filters))


def _separable_twice(inputs: int, filters: int, kernel: int, stride: int, config: _Config) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        _conv(inputs, inputs, kernel, stride=stride, groups=inputs),
        _conv(inputs, filters, 1),
        config.norm(filters),
        nn.ReLU(inplace=True),
        _conv(filters, filters, kernel, groups=filters),
        _conv(filters, filters, 1),
        config.norm(filters),
    )


def _conv(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int | None = None, groups: int = 1
) -> nn.Conv2d:
    """A convolution whose initial weights keep the variance of the gradient."""
    deviation = math.sqrt(2.6 * groups / (outputs * kernel * kernel))
    return conv(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups, deviation=deviation)
