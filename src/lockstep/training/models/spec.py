"""What is known of a model before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.training.models.catalogue import LearningRate

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the benchmark must know of a model before and while it builds it.

    ``build(num_classes)`` makes a fresh model with weights drawn from torch's default generator: the same
    ``torch.manual_seed`` gives the same weights. Pictures go in as floats of shape
    (batch, ``input_channels``, ``image_size``, ``image_size``); logits come out, or in training a pair
    (logits, auxiliary logits) where a model has such a head.
    """

    name: str
    image_size: int
    default_batch_size: int
    default_learning_rate: LearningRate
    build: Callable[[int], nn.Module]
    input_channels: int = 3
