"""How a server clips the mean of the workers' gradients before its optimizer gets it: as torch.nn.utils does it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lockstep.protocol.core.effects import Apply


@dataclass(frozen=True, slots=True)
class Clipping:
    """What becomes of each element; the scale is the same on all servers."""

    scale: float = 1.0
    limit: float = math.inf

    @classmethod
    def of(cls, effect: Apply) -> Clipping:
        return cls(effect.scale, effect.limit)

    @property
    def changes(self) -> bool:
        """Whether anything is changed: a loan must not be."""
        return self.scale != 1.0 or self.limit != math.inf

    def clip(self, mean: Tensor) -> Tensor:
        """This mean, clipped in place."""
        if self.scale != 1.0:
            mean.mul_(self.scale)
        return self.limited(mean)

    def limited(self, mean: Tensor) -> Tensor:
        """The same without the scale."""
        if self.limit != math.inf:
            mean.clamp_(-self.limit, self.limit)
        return mean


NOT_CLIPPED = Clipping()
