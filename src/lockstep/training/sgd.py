"""Plain SGD out of place: the next version of a bucket in one pass over memory.

``torch.optim.SGD`` works in place, so the old version would first be copied into the other slot, and the sum of the
gradients be written and read again. Here a bucket is walked in pieces that stay in a cache, and each piece is
reduced and updated at once: gradients and old values are read once, new values are written once. The
arithmetic is torch's own, call by call, so the bits are the same (``tests/training/test_sgd.py`` holds that).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.runtime.store import StoreTimes
from lockstep.training.reduction import mean_of

PIECE_BYTES = 1 << 20
"""Measured: below, the calls cost more than the cache saves; above it, nothing is gained."""


class SgdNumbers:
    """The settings of one group that count in a step."""

    __slots__ = ("dampening", "decay", "momentum", "nesterov", "rate")

    def __init__(self, group: dict[str, object]) -> None:
        self.rate = _number(group["lr"])
        self.decay = _number(group["weight_decay"])
        self.momentum = _number(group["momentum"])
        self.dampening = _number(group["dampening"])
        self.nesterov = bool(group["nesterov"])


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``next_version`` does what this optimizer would do."""
    if type(optimizer) is not torch.optim.SGD:
        return False
    group = optimizer.param_groups[0]
    return not any(group.get(name) for name in ("fused", "foreach", "maximize", "differentiable"))


def next_version(
    optimizer: torch.optim.Optimizer,
    old: Tensor,
    new: Tensor,
    gradients: Sequence[Tensor],
    count: int,
    scratch: Tensor,
    times: StoreTimes,
) -> None:
    """Write to ``new`` what a step from ``old`` gives, with the mean ``((g0 + g1) + g2) / count``.

    ``scratch``: memory of the type of ``old``, of a piece at least. Momentum is kept where torch keeps it.
    """
    group = optimizer.param_groups[0]
    numbers, parameter = SgdNumbers(group), group["params"][0]
    pieces = PIECE_BYTES // old.element_size()
    momentum: Tensor | None = None
    first = False
    if numbers.momentum:
        state = optimizer.state[parameter]
        momentum = state.get("momentum_buffer")
        if momentum is None:
            first, momentum = True, torch.empty_like(old)
            state["momentum_buffer"] = momentum
    parts = zip(*(_split(gradient, pieces) for gradient in gradients), strict=True)
    moving = [None] * (-(-old.numel() // pieces)) if momentum is None else _split(momentum, pieces)
    for before, after, given, moved in zip(_split(old, pieces), _split(new, pieces), parts, moving, strict=True):
        began = time.perf_counter()
        room = scratch[: before.numel()]
        mean = mean_of(given, count, room)
        reduced = time.perf_counter()
        torch.add(before, _direction(mean, before, moved, room, numbers, first=first), alpha=-numbers.rate, out=after)
        times.reduce += reduced - began
        times.update += time.perf_counter() - reduced


def _split(whole: Tensor, elements: int) -> Sequence[Tensor]:
    """In pieces; most buckets of a small model are one, and are not cut for nothing."""
    return (whole,) if 0 < whole.numel() <= elements else whole.split(elements)


def _direction(
    mean: Tensor, before: Tensor, moved: Tensor | None, room: Tensor, numbers: SgdNumbers, *, first: bool
) -> Tensor:
    """What is subtracted, but for the rate. ``mean`` may be a loan: it is never written to."""
    if numbers.decay:
        mean = torch.add(mean, before, alpha=numbers.decay, out=room)
    if moved is None:
        return mean
    if first:
        moved.copy_(mean)
    else:
        moved.mul_(numbers.momentum).add_(mean, alpha=1 - numbers.dampening)
    return torch.add(mean, moved, alpha=numbers.momentum, out=room) if numbers.nesterov else moved


def _number(value: object) -> float:
    assert isinstance(value, int | float | Tensor)
    return float(value)
