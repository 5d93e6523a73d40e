"""Whether the calls of several ranks are the same call: operation, dtype, and as much of the sizes as must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

from lockstep.flight.account import Aspect, CallSide
from lockstep.flight.recording import RecordedCall

BY_INPUT: Final = frozenset(
    {
        *("all_reduce", "allreduce_coalesced", "all_reduce_barrier", "broadcast", "reduce", "gather"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    }
)
"""What goes in has the same number of elements everywhere."""
BY_OUTPUT: Final = frozenset(
    {
        *("all_gather", "_all_gather_base", "all_gather_single", "all_gather_into_tensor", "scatter"),
        "all_gather_into_tensor_coalesced",
    }
)
"""What comes out has. In all others (all-to-all) sizes may well differ."""

NEEDS_ALL: Final = frozenset(
    {
        *("all_reduce", "allreduce_coalesced", "all_reduce_barrier", "barrier"),
        *("all_gather", "_all_gather_base", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    }
)
"""Nobody can finish such a call before all have entered it."""

_ORDER: Final = (Aspect.OPERATION, Aspect.DTYPE, Aspect.SIZE)


def first_difference(calls: Mapping[int, Sequence[RecordedCall]]) -> tuple[Aspect, tuple[CallSide, ...]] | None:
    """In what these calls of several ranks differ, and who agrees with whom. ``calls``: by rank; a call that was put
    together from several has several records."""
    some = next(iter(calls.values()))
    if all(map(_alike, calls.values(), repeat(some))):  # nearly all are, and rings are long
        return None
    for aspect in _ORDER:
        sides: dict[object, list[int]] = {}
        for rank in sorted(calls):
            value = _value(aspect, calls[rank])
            if value is not None:
                sides.setdefault(value, []).append(rank)
        if len(sides) > 1:
            by_size = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            return aspect, tuple(CallSide(tuple(ranks), calls[ranks[0]][-1]) for ranks in by_size)
    return None


def _alike(one: Sequence[RecordedCall], other: Sequence[RecordedCall]) -> bool:
    return len(one) == len(other) and all(
        mine.operation == its.operation and mine.inputs == its.inputs and mine.outputs == its.outputs
        for mine, its in zip(one, other, strict=True)
    )


def _value(aspect: Aspect, calls: Sequence[RecordedCall]) -> object:
    """What must be the same on every rank; None: it need not be, or is not known."""
    if aspect is Aspect.OPERATION:
        return tuple(call.operation for call in calls)
    if len({call.operation for call in calls}) > 1 or calls[0].operation not in BY_INPUT | BY_OUTPUT:
        return None
    tensors = [call.inputs if call.operation in BY_INPUT else call.outputs for call in calls]
    if not all(one.sizes for one in tensors):
        return None
    if aspect is Aspect.DTYPE:
        return tuple(sorted({dtype for one in tensors for dtype in one.dtypes})) or None
    return sum(one.elements for one in tensors)
