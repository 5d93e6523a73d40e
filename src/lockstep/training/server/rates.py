"""The numbers of a parameter group, as they are sent to the servers with every step.

Whatever a scheduler may change between two steps is a number: the learning rate, momentum, both betas. Tuples are
sent as ``betas.0`` and ``betas.1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping

from torch import Tensor

from lockstep.foreign import plain
from lockstep.protocol.core.messages import GroupRates


def numbers_of(group: Mapping[str, object], names: frozenset[str]) -> GroupRates:
    """The options ``names`` of a group that are numbers, or tuples of numbers, now; ValueError for nan and infinity."""
    found: dict[str, float] = {}
    for name in sorted(names):
        value = group.get(name)
        if isinstance(value, tuple | list):
            found.update((f"{name}.{index}", float(part)) for index, part in enumerate(value))
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            found[name] = float(value)
    wrong = next((name for name, value in found.items() if not math.isfinite(value)), None)
    if wrong is not None:
        raise ValueError(f"the optimizer's {wrong} is {found[wrong]}; no step can be made with that")
    return GroupRates(tuple(found), tuple(found.values()))


def set_numbers(group: MutableMapping[str, object], rates: GroupRates) -> None:
    """Write the numbers back; each keeps the type (bool, number, tuple) that it has in the group.

    ValueError for names that are not numbers there: they come from another task, and ``params`` is one of the group's.
    """
    for name, value in zip(rates.names, rates.values, strict=True):
        stem, dot, index = name.partition(".")
        former = group.get(stem)
        if dot and isinstance(former, tuple) and index.isdecimal() and int(index) < len(former):
            parts = list(former)
            parts[int(index)] = value
            group[stem] = tuple(parts)
        elif dot or stem not in group or not isinstance(former, int | float | Tensor | None):
            raise ValueError(f"the optimizer has no number {plain(name, 100)!r}")
        else:
            group[stem] = bool(value) if isinstance(former, bool) else value
