"""Parameters are looked at as often as costs next to nothing."""

from __future__ import annotations

import pytest
import torch

from lockstep.training.parameter_watch import FIRST_LOOKS, REST, ParameterWatch


class Clock:
    """Each look takes one second; other time passes by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def watched(*values: float) -> tuple[ParameterWatch, list[torch.Tensor], Clock]:
    tensors, clock = [torch.full((3,), value) for value in values], Clock()
    return ParameterWatch([(f"p{i}", one) for i, one in enumerate(tensors)], clock), tensors, clock


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_that_is_not_finite_is_named_once(value: float) -> None:
    watch, tensors, _ = watched(1.0, 2.0, 3.0)
    assert watch.look(0) is None
    tensors[1][2] = tensors[2][0] = value
    assert str(watch.look(1)) == "parameter 'p1' contains NaN or infinity after step 1"
    assert watch.look(2) is None
    assert watch.look_now(2) is None


def test_after_the_first_looks_the_time_of_a_look_decides() -> None:
    watch, tensors, clock = watched(1.0)
    for step in range(FIRST_LOOKS):
        assert watch.look(step) is None
    tensors[0].fill_(float("nan"))
    looks = 0
    while (found := watch.look(FIRST_LOOKS + looks)) is None:
        looks += 1
        assert looks < 2 * REST
    took = 0.5
    assert looks * 0.5 == pytest.approx(REST * took, rel=0.1)
    assert str(found).endswith(f"(all were finite after step {FIRST_LOOKS - 1})")
    assert clock.now > 0


def test_the_last_step_is_always_looked_at() -> None:
    watch, tensors, _ = watched(1.0)
    for step in range(FIRST_LOOKS):
        watch.look(step)
    tensors[0].fill_(float("nan"))
    assert watch.look(FIRST_LOOKS) is None
    assert watch.look_now(FIRST_LOOKS) is not None


def test_large_numbers_and_whole_ones_are_finite() -> None:
    huge = torch.full((1000,), 1e30)
    watch = ParameterWatch([("huge", huge), ("whole", torch.ones(2, dtype=torch.int64))])
    assert watch.look(0) is None
    assert watch.look_now(0) is None


def test_parameters_that_begin_this_way_are_named_as_such() -> None:
    watch, _, _ = watched(float("nan"))
    assert str(watch.look(-1)) == "parameter 'p0' contains NaN or infinity before the first step"
