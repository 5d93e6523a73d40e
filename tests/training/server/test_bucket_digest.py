"""Any two elements that differ make another digest, also if a sum over all of them would not show it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.training.server.bucket_digest import digest_of

SIZE = 3 * 1024 + 7


def _nudged(values: Tensor, *changes: tuple[int, int]) -> Tensor:
    """The last bits of some elements are others."""
    changed = values.clone()
    for place, by in changes:
        changed.view(torch.int32)[place] += by
    return changed


@pytest.mark.parametrize(("one", "other"), [(0, 1), (5, 1029), (17, 2 * 1024 + 900), (1, SIZE - 1), (3073, 3074)])
def test_two_elements_that_were_rounded_in_opposite_directions_are_noticed(one: int, other: int) -> None:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    drifted = _nudged(values, (one, 1), (other, -1))
    assert digest_of(values, []) != digest_of(drifted, [])
    assert digest_of(values, []) == digest_of(values.clone(), [])


def test_the_optimizers_state_counts_whatever_its_names_order() -> None:
    values, moved, steps = torch.zeros(2000), torch.ones(2000), torch.tensor(3.0)
    here = digest_of(values, [{"step": steps, "moved": moved}])
    assert here == digest_of(values, [{"moved": moved, "step": steps}])
    assert here != digest_of(values, [{"moved": _nudged(moved, (1999, 1)), "step": steps}])
    assert here != digest_of(values, [{"moved": moved, "step": steps + 1}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_elements_of_any_width(dtype: torch.dtype) -> None:
    values = torch.zeros(SIZE, dtype=dtype)
    other = values.clone()
    other[1500] = 1
    assert digest_of(values, []) != digest_of(other, [])
