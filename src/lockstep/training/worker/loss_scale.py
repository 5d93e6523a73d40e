"""The loss scale of 16-bit training: the loss is multiplied and gradients divided, so that small ones do not vanish."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.training.torch_private import foreach_norm

LARGEST = 2.0**24


class LossScale:
    """A factor. With ``auto_loss_scale``: halved on infinity (that step is skipped), doubled after many good steps."""

    def __init__(self, factor: float = 1.0, raise_every: int = 0) -> None:
        """``raise_every``: how many good steps double the factor; 0: it never changes."""
        self.factor = factor
        self._raise_every = raise_every
        self._good = 0
        self.skipped = 0

    @property
    def is_automatic(self) -> bool:
        return self._raise_every > 0

    def numbers(self) -> tuple[float, int, int]:
        """Its state: the factor, consecutive good steps, skipped steps."""
        return self.factor, self._good, self.skipped

    def set_numbers(self, factor: float, good: float, skipped: float) -> None:
        """Continue from this state."""
        self.factor, self._good, self.skipped = factor, int(good), int(skipped)

    def judge(self, gradients: Iterable[Tensor | None]) -> bool:
        """Whether a step's gradients may be applied; adapts the factor."""
        return self.note(not self.is_automatic or all_finite(gradients))

    def note(self, finite: bool) -> bool:
        """Adapt the factor to the outcome of a step, and return whether the step counts."""
        if not self.is_automatic:
            return True
        if not finite:
            self.factor = max(1.0, self.factor / 2)
            self._good = 0
            self.skipped += 1
            return False
        self._good += 1
        if self._good >= self._raise_every:
            self.factor = min(LARGEST, self.factor * 2)
            self._good = 0
        return True


def all_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether all gradients are finite; fetches one number from the device."""
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        return True
    norms = foreach_norm(found, float("inf"))
    return bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())
