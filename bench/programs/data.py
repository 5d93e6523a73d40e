"""Synthetic data that is drawn anew for every step, as a program that reads real data does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOKENS = 1 << 20
IMAGES_KEPT = 4


def tokens(
    vocabulary: int, batch_size: int, length: int, generator: torch.Generator
) -> Callable[[], tuple[Tensor, ...]]:
    """Windows at random places of one long text, and the same windows one token later."""
    text = torch.randint(vocabulary, (TOKENS,), generator=generator)

    def batch() -> tuple[Tensor, ...]:
        places = torch.randint(TOKENS - length - 1, (batch_size,), generator=generator)
        windows = torch.stack([text[place : place + length + 1] for place in places.tolist()])
        return pinned(windows[:, :-1].contiguous()), pinned(windows[:, 1:].contiguous())

    return batch


def images(side: int, batch_size: int, generator: torch.Generator) -> Callable[[], tuple[Tensor, ...]]:
    """A few batches of noise, again and again: making noise takes longer than reading a photograph does."""
    kept = [
        (
            pinned(torch.randn(batch_size, 3, side, side, generator=generator)),
            pinned(torch.randint(1000, (batch_size,), generator=generator)),
        )
        for _ in range(IMAGES_KEPT)
    ]
    made = 0

    def batch() -> tuple[Tensor, ...]:
        nonlocal made
        made += 1
        return kept[made % IMAGES_KEPT]

    return batch


def pinned(values: Tensor) -> Tensor:
    return values.pin_memory() if torch.cuda.is_available() else values
