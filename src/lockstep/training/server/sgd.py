"""Plain SGD out of place: the next version of a bucket in one pass over memory.

``torch.optim.SGD`` works in place, so the old version would first have to be copied into the other slot, and the sum
of the gradients written and read again. Here a bucket is processed in pieces that stay in a cache, and each piece is
reduced and updated at once: gradients and old values are read once, new values are written once. The
arithmetic is torch's own, call by call, so the bits are the same (``tests/training/server/test_sgd.py`` checks that).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.runtime.task.store import StoreTimes
from lockstep.training.server.clipping import NOT_CLIPPED, Clipping
from lockstep.training.server.mean_room import MeanRoom
from lockstep.training.server.piece_pool import Finished, PiecePool

PIECE_BYTES = 1 << 20
"""Measured: below this, the calls cost more than the cache saves; above it, nothing is gained."""


def mean_of(
    given: Sequence[Tensor], count: int, room: Tensor, *, may_be_loan: bool = True, clipping: Clipping = NOT_CLIPPED
) -> Tensor:
    """The mean of the workers' gradients in worker order, ((g0 + g1) + g2) / count, clipped, in ``room``.

    Gradients may be narrower than ``room``. A single one of the same type is its own mean; ``may_be_loan``: the caller
    only reads it.
    """
    if len(given) == count == 1 and given[0].dtype == room.dtype and may_be_loan and not clipping.changes:
        return given[0]
    if len(given) == count == 1 and given[0].dtype == room.dtype and clipping.scale != 1.0:
        torch.mul(given[0], clipping.scale, out=room)
        return clipping.limited(room)
    if len(given) > 1 and given[0].dtype == room.dtype == given[1].dtype:
        torch.add(given[0], given[1], out=room)
        rest = given[2:]
    else:
        room.copy_(given[0])
        rest = given[1:]
    for gradient in rest:
        room.add_(gradient)
    if count > 1:
        room.div_(count)
    return clipping.clip(room)


class SgdNumbers:
    """The settings of one group that matter in a step."""

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
    crew: PiecePool,
    times: StoreTimes,
    finished: Finished,
    clipping: Clipping = NOT_CLIPPED,
    kept: MeanRoom | None = None,
) -> None:
    """Write to ``new`` what a step from ``old`` gives, with the mean ``((g0 + g1) + g2) / count``, clipped; tell when
    that is done. Momentum is kept where torch keeps it. ``kept``: where the mean itself stays.
    """
    group = optimizer.param_groups[0]
    numbers = SgdNumbers(group)
    momentum, first = _momentum(optimizer, old) if numbers.momentum else (None, False)
    elements = PIECE_BYTES // old.element_size()
    before, after = _split(old, elements), _split(new, elements)
    given = [_split(gradient, elements) for gradient in gradients]
    moved = [None] * len(before) if momentum is None else _split(momentum, elements)
    means = None if kept is None else kept.in_pieces(_split(kept.whole, elements))

    def update(piece: int, thread: int) -> None:
        began = time.perf_counter()
        values, moving = before[piece], moved[piece]
        room = crew.room(thread, values.numel(), old.dtype)
        parts, place = [whole[piece] for whole in given], room if means is None else means[piece]
        mean = mean_of(parts, count, place, may_be_loan=kept is None, clipping=clipping)
        if kept is not None:
            kept.piece_is_written()
        reduced = time.perf_counter()
        direction = _direction(mean, values, moving, room, numbers, first=first)
        torch.add(values, direction, alpha=-numbers.rate, out=after[piece])
        if thread == 0:
            times.reduce += reduced - began
            times.update += time.perf_counter() - reduced

    crew.begin(len(before), update, finished)


def _momentum(optimizer: torch.optim.Optimizer, like: Tensor) -> tuple[Tensor, bool]:
    """Where torch keeps the momentum, and whether this is its first step."""
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    known = state.get("momentum_buffer")
    if known is None:
        state["momentum_buffer"] = made = torch.empty_like(like)
        return made, True
    assert isinstance(known, Tensor)
    return known, False


def _split(whole: Tensor, elements: int) -> Sequence[Tensor]:
    """The pieces; most buckets of a small model are a single piece and are not cut."""
    return (whole,) if 0 < whole.numel() <= elements else whole.split(elements)


def _direction(
    mean: Tensor, before: Tensor, moved: Tensor | None, room: Tensor, numbers: SgdNumbers, *, first: bool
) -> Tensor:
    """What is subtracted, except for the rate. ``mean`` may be a loan: it is never written to."""
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
