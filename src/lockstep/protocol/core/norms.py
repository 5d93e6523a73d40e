"""The norm of a gradient that lies in parts on several servers, and what it is clipped by.

Parts are added up exactly (``math.fsum``), so the result does not depend on the order in which they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Collection

EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


def combined(norms: Collection[float], norm_type: float) -> float:
    """The norm of everything whose parts have these norms."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if math.isinf(norm_type) or largest in (0.0, math.inf):
        return largest
    # Relative to the largest: no power of a finite norm overflows.
    return largest * math.pow(math.fsum(math.pow(norm / largest, norm_type) for norm in norms), 1.0 / norm_type)


def clipping_scale(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is ``limit`` at most; NaN if it is none."""
    scale = limit / (norm + EPSILON)
    return 1.0 if scale > 1.0 else scale
