"""The mean of the workers' gradients on a server's CPU: in the order of worker index, ((g0 + g1) + g2) / count."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, add


def mean_of(given: Sequence[Tensor], count: int, room: Tensor, *, may_be_loan: bool = True) -> Tensor:
    """The mean, in ``room``. Gradients may be narrower than it.

    A single gradient of the right type is its own mean; ``may_be_loan``: the caller only reads it.
    """
    if len(given) == count == 1 and given[0].dtype == room.dtype and may_be_loan:
        return given[0]
    if len(given) > 1 and given[0].dtype == room.dtype == given[1].dtype:
        add(given[0], given[1], out=room)
        rest = given[2:]
    else:
        room.copy_(given[0])
        rest = given[1:]
    for gradient in rest:
        room.add_(gradient)
    return room.div_(count) if count > 1 else room
