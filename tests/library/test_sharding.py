"""Shares of a data set: disjoint, complete, ending on all workers at the same step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.library.errors import UsageError
from lockstep.library.sharding import IterableShard, MapShard, make_shard
from lockstep.runtime.watch.status import MainThread

SIZES = {"examples": st.integers(5, 60), "workers": st.integers(1, 5), "batch_size": st.integers(1, 7)}


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def share(dataset: Any, batch_size: int, worker: int, workers: int, **options: Any) -> MapShard | IterableShard:
    chosen: dict[str, Any] = {"shuffle": False, "seed": 0, "drop_last": False, "collate": list} | options
    return make_shard(dataset, batch_size, (worker, workers), **chosen)


@given(shuffle=st.booleans(), **SIZES)
def test_numbered_examples_are_dealt_out_disjoint_and_complete(
    examples: int, workers: int, batch_size: int, shuffle: bool
) -> None:
    shares = [share(list(range(examples)), batch_size, w, workers, shuffle=shuffle, seed=7) for w in range(workers)]
    batches = [list(one) for one in shares]
    assert len({len(one) for one in batches}) == 1  # the same number of steps on every worker
    seen = [example for one in batches for batch in one for example in batch]
    assert sorted(seen) == list(range(examples))
    assert all(len(batch) == batch_size for one in batches for batch in one[:-1])
    # The last one has the rest: at least one example, at most one more than the others.
    assert all(1 <= len(one[-1]) <= batch_size + 1 for one in batches)


@given(**SIZES)
def test_streams_are_dealt_out_disjoint_and_complete(examples: int, workers: int, batch_size: int) -> None:
    batches = [list(share(Stream(examples), batch_size, w, workers)) for w in range(workers)]
    assert len({len(one) for one in batches}) == 1
    seen = [example for one in batches for batch in one for example in batch]
    assert sorted(seen) == list(range(examples))


@given(**SIZES)
def test_both_kinds_deal_out_alike(examples: int, workers: int, batch_size: int) -> None:
    for worker in range(workers):
        numbered = share(list(range(examples)), batch_size, worker, workers)
        assert list(numbered) == list(share(Stream(examples), batch_size, worker, workers))


@pytest.mark.parametrize("examples", [16, 17, 18, 19])
def test_a_plain_loop_over_pairs_gets_a_pair_in_every_step(examples: int) -> None:
    """Three workers and batches of 2: of 19 examples one is left over, of 17 five."""
    dataset = TensorDataset(torch.arange(float(examples)), torch.arange(examples))
    for worker in range(3):
        whole = make_shard(dataset, 2, (worker, 3), shuffle=False, seed=0, drop_last=False, collate=None)
        for inputs, labels in whole:
            assert len(inputs) == len(labels) >= 1


def test_dropping_the_last_step_leaves_only_whole_ones() -> None:
    for dataset in (list(range(23)), Stream(23)):
        batches = list(share(dataset, 4, 1, 2, drop_last=True))
        assert [len(batch) for batch in batches] == [4, 4]


def test_a_step_can_be_asked_for_again() -> None:
    one = share(list(range(30)), 4, 1, 2, shuffle=True, seed=3)
    assert isinstance(one, MapShard)
    epochs = [one[step] for step in range(2 * len(one))]
    assert epochs[: len(one)] != epochs[len(one) :]  # another order in the next epoch
    one.position(5)
    assert next(iter(one)) == epochs[5] == one[5]
    again = share(list(range(30)), 4, 1, 2, shuffle=True, seed=3)
    assert isinstance(again, MapShard)
    assert [again[step] for step in range(2 * len(one))] == epochs


def test_a_stream_goes_on_from_its_position() -> None:
    whole = list(share(Stream(30), 2, 0, 3))
    moved = share(Stream(30), 2, 0, 3)
    moved.position(2)
    assert list(moved) == whole[2:]
    assert list(moved) == whole  # the next pass is a whole one


def test_shares_work_with_the_loader_of_torch() -> None:
    dataset = TensorDataset(torch.arange(10.0), torch.arange(10))
    seen = []
    for worker in range(2):
        one = make_shard(dataset, 2, (worker, 2), shuffle=True, seed=1, drop_last=False, collate=None)
        assert isinstance(one, MapShard)
        loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=one.batches())
        seen += [int(label) for _, labels in loader for label in labels]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        ([1, 2, 3], {"batch_size": 0}, "batch_size must be at least 1"),
        ([1], {}, "1 examples for 2 workers; start at most as many workers"),
        ([1, 2, 3], {"drop_last": True}, "3 examples, fewer than the 8 that 2 workers need per step"),
        (Stream(3), {"shuffle": True}, "cannot shuffle a stream"),
        (7, {}, "takes a data set with numbered examples or a stream, not int"),
    ],
)
def test_wrong_shares_get_a_sentence(dataset: Any, options: dict[str, Any], sentence: str) -> None:
    chosen = {"batch_size": 4} | options
    with pytest.raises(UsageError, match=sentence):
        share(dataset, chosen.pop("batch_size"), 0, 2, **chosen)


def test_a_stream_with_fewer_examples_than_workers_gets_a_sentence() -> None:
    with pytest.raises(UsageError, match="2 examples for 3 workers"):
        list(share(Stream(2), 4, 0, 3))


@pytest.mark.parametrize("dataset", [range(10), Stream(10)], ids=["numbered", "stream"])
def test_examples_are_counted_as_they_are_taken(dataset: Any) -> None:
    shard = share(dataset, 2, 0, 2)
    main = MainThread()
    shard.on_taken = main.took
    batches = [len(batch) for batch in shard]
    assert sum(batches) == main.examples == 5
