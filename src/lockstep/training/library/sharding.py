"""Each worker's share of a data set: disjoint, complete, and ending on all workers at the same step.

A step takes the next ``batch_size`` times *workers* examples and deals them out in turn. Only the last step of an epoch
may have fewer: then shares differ by one example, and a worker whose share is empty gets None (it calls
``optimizer.step()`` all the same, and contributes nothing). Nobody has to ask anybody: every worker knows the whole
order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from lockstep.training.library.errors import UsageError
from lockstep.training.library.steps import step_seed

Collate = Callable[[list[Any]], Any]


class MapStyle(Protocol):
    """Anything with a length and elements by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DataShard:
    """What the two kinds have in common: a position, and batches from there on."""

    def __init__(self, batch_size: int, worker: int, workers: int, collate: Collate) -> None:
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} examples is none; give job.shard() a batch_size above 0")
        self.batch_size = batch_size
        self.worker = worker
        self.workers = workers
        self._collate = collate
        self._next = 0

    def position(self, step: int) -> None:
        """The next batch is that of ``step``. ``job.steps(..., data=shard)`` calls this."""
        self._next = step

    def _batch(self, examples: list[Any]) -> Any:
        return self._collate(examples) if examples else None


class MapShard(DataShard):
    """One worker's share of a data set with numbered examples. ``shard[step]`` is the batch of any step."""

    def __init__(
        self,
        dataset: MapStyle,
        batch_size: int,
        worker: int,
        workers: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate: Collate = default_collate,
    ) -> None:
        super().__init__(batch_size, worker, workers, collate)
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        together = batch_size * workers
        self.steps_per_epoch = len(dataset) // together if drop_last else -(-len(dataset) // together)
        """How many steps one pass over the data takes, on every worker."""
        if not self.steps_per_epoch:
            raise UsageError(
                f"the data set has {len(dataset)} examples, fewer than the {together} of a step of {workers} workers; "
                "take a smaller batch_size, or drop_last=False"
            )
        self._order: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.steps_per_epoch

    def indices(self, step: int) -> list[int]:
        """The examples of this worker in ``step``; steps beyond the first epoch go on with the next."""
        epoch, within = divmod(step, self.steps_per_epoch)
        together = self.batch_size * self.workers
        taken = self._order_of(epoch)[within * together : (within + 1) * together]
        return [int(index) for index in taken[self.worker :: self.workers]]

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            order = torch.arange(len(self._dataset))
            if self._shuffle:
                # The same on every worker, hence the worker number that no worker has.
                generator = torch.Generator().manual_seed(step_seed(self._seed, epoch, -1))
                order = torch.randperm(len(self._dataset), generator=generator)
            self._order = (epoch, order)
        return self._order[1]

    def __getitem__(self, step: int) -> Any:
        """The batch of ``step``, or None where this worker's share of it is empty."""
        if step < 0:
            raise IndexError("steps are counted from 0")
        return self._batch([self._dataset[index] for index in self.indices(step)])

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position to the end of its epoch."""
        while True:
            step, self._next = self._next, self._next + 1
            yield self[step]
            if self._next % self.steps_per_epoch == 0:
                return

    def batches(self) -> Iterator[list[int]]:
        """The same as lists of numbers: a ``batch_sampler`` for a DataLoader with processes of its own."""
        while True:
            step, self._next = self._next, self._next + 1
            yield self.indices(step)
            if self._next % self.steps_per_epoch == 0:
                return


class IterableShard(DataShard):
    """One worker's share of a stream of examples. Every worker must see the same stream."""

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        worker: int,
        workers: int,
        *,
        drop_last: bool,
        collate: Collate = default_collate,
    ) -> None:
        super().__init__(batch_size, worker, workers, collate)
        self._dataset = dataset
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        """One pass over the stream, from the position on."""
        together = self.batch_size * self.workers
        stream = iter(self._dataset)
        for _ in islice(stream, self._next * together):
            pass
        while examples := list(islice(stream, together)):
            if self._drop_last and len(examples) < together:
                break
            self._next += 1
            yield self._batch(examples[self.worker :: self.workers])
        self._next = 0


def make_shard(
    dataset: Any,
    batch_size: int,
    place: tuple[int, int],
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate: Collate | None,
) -> MapShard | IterableShard:
    """The share of one worker of any torch data set; ``place`` is its number and the number of workers."""
    worker, workers = place
    collate = collate or default_collate
    numbered = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not numbered:
        if not isinstance(dataset, Iterable):
            kind = type(dataset).__name__
            raise UsageError(f"job.shard() takes a data set with numbered examples or a stream, not {kind}")
        if shuffle:
            raise UsageError(
                "a stream cannot be shuffled by job.shard(): nobody knows its end; shuffle inside the data set, in the "
                "same order on every worker"
            )
        return IterableShard(dataset, batch_size, worker, workers, drop_last=drop_last, collate=collate)
    return MapShard(
        dataset, batch_size, worker, workers, shuffle=shuffle, seed=seed, drop_last=drop_last, collate=collate
    )
