"""Numbers that are equal for equal bits: a cheap comparison of tensors that are never in one place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice

import torch
from torch import Tensor

LANES = 1 << 16
"""Values per number of a digest: few enough to be computed in little memory."""

_MODULUS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that no bit of a number is lost when it is multiplied by it."""


def digest(tensor: Tensor) -> Tensor:
    """64-bit numbers that are equal for equal bits, and for different bits with probability 2**-33 at most.

    Lanes of at most 32 bits times random 64-bit weights, added up modulo 2**64: two lanes differ by less than 2**32, so
    at least 33 bits of the weight remain in the difference. (With 64-bit lanes, only the weight's last bit would remain
    if nothing but signs changed.)
    """
    lane = torch.int16 if tensor.element_size() == 2 else torch.int32
    lanes = tensor.detach().contiguous().view(-1).view(lane)
    weights = _weights(tensor.device)
    return torch.stack([(part * weights[: len(part)]).sum() for part in lanes.split(LANES)])


def digest_lists(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The digest of each tensor; of an empty one it is empty."""
    digests = [digest(one) if one.numel() else torch.empty(0, dtype=torch.int64, device=one.device) for one in tensors]
    # Fetched together, so that there is only one wait for a GPU.
    numbers = iter(torch.cat(digests).tolist() if digests else [])
    return [list(islice(numbers, len(one))) for one in digests]


def digests_of(tensors: Sequence[Tensor]) -> list[int]:
    """One number of 63 bits for each tensor."""
    return [combined(numbers) for numbers in digest_lists(tensors)]


def combined(numbers: Sequence[int]) -> int:
    """One number of 63 bits for several, which depends on their order."""
    result = 0
    for number in numbers:
        result = (result * _FACTOR + number + 1) % _MODULUS
    return result >> 1


@cache
def _weights(device: torch.device) -> Tensor:
    """The same in every run; from a separate generator, so that the program's random numbers are left alone."""
    made = torch.empty(LANES, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(0))
    return made.to(device)
