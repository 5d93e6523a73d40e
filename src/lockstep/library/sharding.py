"""Each worker's share of a data set: disjoint, complete, and ending on all workers at the same step.

A step takes the next ``batch_size`` times *workers* examples and deals them out in turn. Only the last step of an epoch
differs: it has the rest. A rest with fewer examples than workers belongs to the step before it, whose batches are then
one example larger on some workers: so every worker has a batch in every step, and a plain ``for x, y in shard`` works.
Workers need not communicate: each knows the whole order of the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, TypedDict

import torch
from torch.utils.data import IterableDataset, default_collate

from lockstep.library.errors import UsageError
from lockstep.library.own_loops import took_batch

Collate = Callable[[list[Any]], Any]
MAX_SEED = (1 << 63) - 1


def step_seed(seed: int, step: int, worker: int) -> int:
    """63 bits that differ whenever one of the three does: what they seed can be repeated."""
    digest = hashlib.sha256(f"{seed} {step} {worker}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


def _ignore(_examples: int) -> None:
    """Nobody counts them. (A function, because a shard may be pickled.)"""


class ShardOptions(TypedDict, total=False):
    """The options of ``job.shard()``; what they are if they are not given: ``make_shard``."""

    shuffle: bool
    seed: int
    drop_last: bool
    collate: Collate | None


class MapStyle(Protocol):
    """Anything with a length and numbered elements."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DataShard:
    """Base of both kinds: a position, and the batches from there on."""

    def __init__(self, batch_size: int, worker: int, workers: int, collate: Collate) -> None:
        if batch_size < 1:
            raise UsageError(f"job.shard() was given batch_size={batch_size}; batch_size must be at least 1")
        self.batch_size = batch_size
        self.worker = worker
        self.workers = workers
        self._collate = collate
        self._next = 0
        self.on_taken: Callable[[int], None] = _ignore
        """Called with the number of examples of each batch that is taken."""

    def position(self, step: int) -> None:
        """Make the batch of ``step`` the next one. ``job.steps(..., data=shard)`` calls this."""
        self._next = step

    def _own(self, examples: Any) -> Any:
        """This worker's part of the examples of a step."""
        return examples[self.worker :: self.workers]

    def _refuse_few(self, examples: int) -> UsageError:
        return UsageError(
            f"the data set has {examples} examples for {self.workers} workers; start at most as many workers as there "
            "are examples"
        )


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
        self._drop_last = drop_last
        together = batch_size * workers
        whole, rest = divmod(len(dataset), together)
        self.steps_per_epoch = whole + (rest >= workers and not drop_last)
        """The number of steps in one pass over the data, on every worker."""
        if not self.steps_per_epoch and not drop_last:
            raise self._refuse_few(len(dataset))
        if not self.steps_per_epoch:
            raise UsageError(
                f"the data set has {len(dataset)} examples, fewer than the {together} that {workers} workers need per "
                "step; use a smaller batch_size, or drop_last=False"
            )
        self._order: tuple[int, torch.Tensor] | None = None
        self._asked = -1

    def order_in(self, step: int) -> str:
        """What decided the examples of ``step``, if they are shuffled and were the last to be asked for; else empty.

        All workers must have the same: with two orders their shares overlap.
        """
        if not self._shuffle or self._asked != step:
            return ""
        return f"{len(self._dataset)} examples in batches of {self.batch_size}, shuffled with seed {self._seed}"

    def __len__(self) -> int:
        return self.steps_per_epoch

    def indices(self, step: int) -> list[int]:
        """This worker's examples in ``step``; steps beyond the first epoch continue with the next."""
        self._asked = step
        epoch, within = divmod(step, self.steps_per_epoch)
        together = self.batch_size * self.workers
        takes_the_rest = within == self.steps_per_epoch - 1 and not self._drop_last
        end = None if takes_the_rest else (within + 1) * together
        own = [int(index) for index in self._own(self._order_of(epoch)[within * together : end])]
        self.on_taken(len(own))
        return own

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            order = torch.arange(len(self._dataset))
            if self._shuffle:
                # The order is the same on every worker, hence a worker number that no worker has.
                generator = torch.Generator().manual_seed(step_seed(self._seed, epoch, -1))
                order = torch.randperm(len(self._dataset), generator=generator)
            self._order = (epoch, order)
        return self._order[1]

    def __getitem__(self, step: int) -> Any:
        """The batch of ``step``."""
        if step < 0:
            raise IndexError(f"step {step} is negative; steps are counted from 0")
        return self._collate([self._dataset[index] for index in self.indices(step)])

    def __iter__(self) -> Iterator[Any]:
        """The batches from the current position to the end of its epoch."""
        while True:
            step, self._next = self._next, self._next + 1
            batch = self[step]
            took_batch("job.shard()", step + 1)
            yield batch
            if self._next % self.steps_per_epoch == 0:
                return

    def batches(self) -> Iterator[list[int]]:
        """The same as lists of indices: a ``batch_sampler`` for a DataLoader with its own worker processes."""
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
        """One pass over the stream, from the current position on."""
        together = self.batch_size * self.workers
        stream = iter(self._dataset)
        for _ in islice(stream, self._next * together):
            pass
        ahead: list[Any] = []
        while examples := ahead + list(islice(stream, together - len(ahead))):
            if len(examples) < (together if self._drop_last else self.workers):
                if not self._next and not self._drop_last:
                    raise self._refuse_few(len(examples))
                break
            if not self._drop_last:
                ahead = list(islice(stream, self.workers))
                if len(ahead) < self.workers:  # too few for a step of their own
                    examples, ahead = examples + ahead, []
            self._next += 1
            took_batch("job.shard()", self._next)
            own = self._own(examples)
            self.on_taken(len(own))
            yield self._collate(own)
        self._next = 0


def make_shard(
    dataset: Any,
    batch_size: int,
    place: tuple[int, int],
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    collate: Collate | None = None,
) -> MapShard | IterableShard:
    """One worker's share of any torch data set; ``place`` is its number and the number of workers."""
    worker, workers = place
    collate = collate or default_collate
    numbered = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not numbered:
        if not isinstance(dataset, Iterable):
            kind = type(dataset).__name__
            raise UsageError(f"job.shard() takes a data set with numbered examples or a stream, not {kind}")
        if shuffle:
            raise UsageError(
                "job.shard() cannot shuffle a stream, because its end is unknown; shuffle inside the data set, in the "
                "same order on every worker"
            )
        return IterableShard(dataset, batch_size, worker, workers, drop_last=drop_last, collate=collate)
    return MapShard(
        dataset, batch_size, worker, workers, shuffle=shuffle, seed=seed, drop_last=drop_last, collate=collate
    )
