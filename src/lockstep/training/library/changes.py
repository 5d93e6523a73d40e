"""Parameters that the program changed itself, where only the optimizer may: the servers would never learn of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from lockstep.protocol.ids import Step
from lockstep.training.binding import Bound
from lockstep.training.library.errors import UsageError

FIRST_STEPS = 3
EVERY = 50
"""A program does the same in every step, or nearly: looking at the first steps, and now and then later, finds it."""

LANES = 1 << 16
"""As many numbers make one of a digest: few enough to be computed in little memory."""


class ChangeWatch:
    """Remembers the bits of the parameters when they came, and compares them before the next step."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self._bound = [b for b in bound if b.local.numel()]
        self._marks: list[list[int]] | None = None

    def remember(self, step: Step) -> None:
        self._marks = self._digests() if step < FIRST_STEPS or step % EVERY == 0 else None

    def forget(self) -> None:
        self._marks = None

    def compare(self, step: Step) -> None:
        """UsageError names the first parameter that changed."""
        if self._marks is None:
            return
        for bound, before, now in zip(self._bound, self._marks, self._digests(), strict=True):
            if before != now:
                name = bound.trained.name
                raise UsageError(
                    f"parameter {name!r} was changed by the program in step {step}, not by the optimizer; the servers "
                    "hold the parameters and would undo it. Call job.publish() after such a change, on every worker"
                )

    def _digests(self) -> list[list[int]]:
        digests = [digest(bound.local) for bound in self._bound]
        # Looked at together, so that there is one wait for a GPU.
        numbers = iter(torch.cat(digests).tolist() if digests else [])
        return [list(islice(numbers, len(one))) for one in digests]


def digest(tensor: Tensor) -> Tensor:
    """Some 64-bit numbers that are equal for equal bits, and for others once in 2**33 times, whatever was done to them.

    Lanes of 32 bits at most times random 64-bit weights, added up modulo 2**64: two lanes differ by less than 2**32, so
    that 33 bits or more of the weight are in the difference. (Of 64-bit lanes only the weight's last bit would be left
    where nothing but signs changed.)
    """
    lane = torch.int16 if tensor.element_size() == 2 else torch.int32
    lanes = tensor.detach().contiguous().view(-1).view(lane)
    weights = _weights(tensor.device)
    return torch.stack([(part * weights[: len(part)]).sum() for part in lanes.split(LANES)])


@cache
def _weights(device: torch.device) -> Tensor:
    """The same in every run; a generator of its own, for the program's random numbers are not ours to use."""
    made = torch.empty(LANES, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(0))
    return made.to(device)
