"""What is known about a model before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.benchmark.models.catalogue import LearningRate

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    MakeBatch = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the benchmark must know about a model to build it.

    ``build(num_classes)`` makes a fresh model with weights drawn from torch's default generator: the same
    ``torch.manual_seed`` gives the same weights. Images go in as floats of shape
    (batch, ``input_channels``, ``image_size``, ``image_size``); logits come out, or in training a pair
    (logits, auxiliary logits) where a model has such a head.
    """

    name: str
    image_size: int
    default_batch_size: int
    default_learning_rate: LearningRate
    build: Callable[[int], nn.Module]
    input_channels: int = 3
    make_batch: MakeBatch | None = None
    """For a model that takes no images: synthetic input and labels. Logits and labels may then be per token."""
