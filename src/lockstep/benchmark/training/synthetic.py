"""Synthetic images: one batch, fixed for the whole run, that costs no time per step.

As in tf_cnn_benchmarks, pixels are drawn from a normal distribution of mean 127 and deviation 60, truncated at two
deviations, so they lie between 7 and 247 like those of a photograph. They are then scaled to -1 .. 1 like
images read from files. tf_cnn_benchmarks did so too until 2018; later versions feed synthetic pixels unscaled,
and alexnet's loss is NaN after two steps. Labels are uniform over all classes but the last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.benchmark.models.layers import truncated_normal_

_MEAN = 127.0
_DEVIATION = 60.0
_HALF_RANGE = 127.5
"""Pixels of 0 to 255 divided by this, less one, lie between -1 and 1."""


@dataclass(frozen=True, slots=True)
class SyntheticBatch:
    """``images`` of shape (batch, channels, height, width) and ``labels`` of shape (batch,), on the device."""

    images: Tensor
    labels: Tensor


def synthetic_generator(seed: int, worker_index: int, replica: int = 0) -> torch.Generator:
    """A generator that depends only on its user and the run's seed."""
    digest = hashlib.sha256(f"synthetic;{seed};{worker_index};{replica}".encode()).digest()
    generator = torch.Generator(device="cpu")
    # torch's CPU generator keeps only the low 32 bits of a seed.
    generator.manual_seed(int.from_bytes(digest[:4], "little"))
    return generator


def synthetic_batch(
    generator: torch.Generator,
    *,
    batch_size: int,
    image_size: int,
    num_classes: int,
    input_channels: int = 3,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> SyntheticBatch:
    """Draw a batch on the CPU, so that it is the same for every device, and place it on the device."""
    images = torch.empty(batch_size, input_channels, image_size, image_size)
    truncated_normal_(images, _DEVIATION, mean=_MEAN, generator=generator)
    images.div_(_HALF_RANGE).sub_(1.0)
    labels = torch.randint(0, max(1, num_classes - 1), (batch_size,), generator=generator)
    return SyntheticBatch(
        images=images.to(device=device, dtype=dtype, memory_format=memory_format),
        labels=labels.to(device=device),
    )
