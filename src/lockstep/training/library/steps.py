"""The random seed of a step: a function of the seed, the step and the worker, so that the step can be repeated."""

from __future__ import annotations

import hashlib
import random
import sys

import torch

MAX_SEED = (1 << 63) - 1


def step_seed(seed: int, step: int, worker: int) -> int:
    """63 bits that differ whenever one of the three does."""
    digest = hashlib.sha256(f"{seed} {step} {worker}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


def seed_everything(seed: int) -> None:
    """Seed torch (all its devices), Python's random module, and numpy if the program uses it."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
