"""Parameters that the program changed itself, where only the optimizer may: the servers would never learn of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.protocol.ids import Step
from lockstep.training.binding import Bound
from lockstep.training.library.errors import UsageError

FIRST_STEPS = 3
EVERY = 50
"""A program does the same in every step, or nearly: looking at the first steps, and now and then later, finds it."""


class ChangeWatch:
    """Remembers the bits of the parameters when they came, and compares them before the next step."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self._bound = [b for b in bound if b.local.numel()]
        self._marks: list[int] | None = None

    def remember(self, step: Step) -> None:
        self._marks = self._sums() if step < FIRST_STEPS or step % EVERY == 0 else None

    def forget(self) -> None:
        self._marks = None

    def compare(self, step: Step) -> None:
        """UsageError names the first parameter that changed."""
        if self._marks is None:
            return
        for bound, before, now in zip(self._bound, self._marks, self._sums(), strict=True):
            if before != now:
                name = bound.trained.name
                raise UsageError(
                    f"parameter {name!r} was changed by the program in step {step}, not by the optimizer; the servers "
                    "hold the parameters and would undo it. Call job.publish() after such a change, on every worker"
                )

    def _sums(self) -> list[int]:
        with torch.no_grad():
            sums = [_bits(bound.local).sum(dtype=torch.int64) for bound in self._bound]
            return torch.stack(sums).tolist() if sums else []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(whole)
