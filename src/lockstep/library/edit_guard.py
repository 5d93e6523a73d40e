"""Detects parameters that the program changed itself: only the optimizer may, since servers do not see the change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from lockstep.library.errors import UsageError
from lockstep.protocol.core.ids import Step
from lockstep.training.worker.binding import Bound

FIRST_STEPS = 3
EVERY = 50
"""Programs do nearly the same in every step, so checking the first steps and an occasional later one is enough."""

LANES = 1 << 16
"""Values per number of a digest: few enough to be computed in little memory."""


class EditGuard:
    """Remembers the parameters' bits when they arrive, and compares them before the next step."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self._bound = [b for b in bound if b.local.numel()]
        self._marks: list[list[int]] | None = None

    def looks_at(self, step: Step) -> bool:
        """Whether the parameters of this step are compared: then all of them are read when it begins."""
        return step < FIRST_STEPS or step % EVERY == 0

    def remember(self, step: Step) -> None:
        self._marks = self._digests() if self.looks_at(step) else None

    def forget(self) -> None:
        self._marks = None

    def compare(self, step: Step) -> None:
        """Raise UsageError naming the first parameter that changed."""
        if self._marks is None:
            return
        for bound, before, now in zip(self._bound, self._marks, self._digests(), strict=True):
            if before != now:
                name = bound.trained.name
                raise UsageError(
                    f"your program changed parameter {name!r} in step {step}, not the optimizer; the servers hold the "
                    "parameters and would undo the change. Call job.publish() after such a change, on every worker"
                )

    def _digests(self) -> list[list[int]]:
        digests = [digest(bound.local) for bound in self._bound]
        # Fetched together, so that there is only one wait for a GPU.
        numbers = iter(torch.cat(digests).tolist() if digests else [])
        return [list(islice(numbers, len(one))) for one in digests]


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


@cache
def _weights(device: torch.device) -> Tensor:
    """The same in every run; from a separate generator, so that the program's random numbers are left alone."""
    made = torch.empty(LANES, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(0))
    return made.to(device)
