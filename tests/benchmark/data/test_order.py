"""Who takes which sample in which step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.benchmark.data.order import EpochSample, OnceThrough, SameAgain, TrainingOrder, permutation


def _orders(size: int, batch: int, workers: int, seed: int = 7) -> list[TrainingOrder]:
    return [TrainingOrder(size, batch, worker, workers, seed) for worker in range(workers)]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))
def test_every_epoch_is_complete_and_no_two_workers_share_a_sample(size: int, batch: int, workers: int) -> None:
    orders = _orders(size, batch, workers)
    steps = -(-3 * size // (batch * workers))
    taken = [place for step in range(steps) for order in orders for place in order.places(step)]
    assert len(set(taken)) == len(taken)
    for epoch in range(3):
        assert {place.index for place in taken if place.epoch == epoch} == set(range(size))


def test_a_resumed_worker_takes_what_it_would_have_taken() -> None:
    whole = TrainingOrder(101, 4, 1, 3, 5)
    told = [whole.places(step) for step in range(40)]
    assert [TrainingOrder(101, 4, 1, 3, 5).places(step) for step in range(17, 40)] == told[17:]


def test_every_worker_has_a_whole_batch_in_every_step_of_an_uneven_set() -> None:
    for order, step in itertools.product(_orders(5, 4, 3), range(20)):
        assert len(order.places(step)) == 4


def test_the_order_depends_on_seed_epoch_and_worker() -> None:
    def indices(seed: int, worker: int, step: int) -> list[int]:
        return [place.index for place in TrainingOrder(1000, 50, worker, 2, seed).places(step)]

    first = indices(1, 0, 0)
    assert first != indices(2, 0, 0)
    assert first != indices(1, 1, 0)
    assert first != indices(1, 0, 10)  # step 10 begins the second epoch
    assert first == indices(1, 0, 0)


def test_the_permutation_is_pinned() -> None:
    # Whoever changes this breaks the resuming of runs that an older version began.
    assert permutation(10, 1, 0).tolist() == PINNED


def test_the_permutation_is_fair() -> None:
    where = np.array([permutation(20, seed, 0).tolist().index(0) for seed in range(4000)])
    counts = np.bincount(where, minlength=20)
    assert counts.min() > 140
    assert counts.max() < 260


def test_an_evaluation_takes_every_sample_once_and_begins_again() -> None:
    order = OnceThrough(10, 4)
    assert order.steps == 3
    assert [len(order.places(step)) for step in range(3)] == [4, 4, 2]
    assert [place.index for step in range(3) for place in order.places(step)] == list(range(10))
    assert order.places(3) == order.places(0)


def test_the_cached_sample_repeats() -> None:
    order = SameAgain(TrainingOrder(100, 3, 0, 1, 1))
    assert order.places(5) == order.places(0) == TrainingOrder(100, 3, 0, 1, 1).places(0)
    assert all(isinstance(place, EpochSample) for place in order.places(9))


def test_an_empty_set_has_no_order() -> None:
    with pytest.raises(ValueError, match="no order"):
        TrainingOrder(0, 1, 0, 1, 0)


PINNED = [1, 5, 9, 6, 3, 8, 2, 4, 0, 7]
