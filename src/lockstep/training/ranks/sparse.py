"""Sparse gradients where every rank trains: they travel as dense ones, and become sparse again, with the same rows.

The mean has the rows that any rank has, as in one process, also those whose numbers are all zero. A rank tells which
rows it lacks with negative zeros: these add up to a negative zero only where nobody has anything else, and change no
other number.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spread(gradient: Tensor, place: Tensor) -> None:
    """Put a sparse gradient into a dense place."""
    whole = gradient.coalesce()
    lacks_all(place)
    # A zero of its own is a positive one.
    place[tuple(whole.indices())] = whole.values() + 0.0


def lacks_all(place: Tensor) -> None:
    """This rank has no row of it."""
    place.fill_(-0.0)


def gathered(mean: Tensor, sparse_dims: int) -> Tensor:
    """The sparse gradient of which this is the dense mean."""
    lacking = (mean == 0) & torch.signbit(mean)
    present = ~lacking.flatten(sparse_dims).all(-1) if mean.dim() > sparse_dims else ~lacking
    indices = present.nonzero().t()
    return torch.sparse_coo_tensor(indices, mean[present], mean.shape, is_coalesced=True, check_invariants=False)


def numbers_of_gradient(gradient: Tensor) -> Tensor:
    """All numbers of it that may not be zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
