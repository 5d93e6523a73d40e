"""The order in which samples are used: a pure function of seed, step and worker, so any step can be resumed.

All epochs, each its own permutation of the whole set, form one sequence. Step *s* takes the next ``global_batch``
places of that sequence, and worker *w* the *w*-th part of them. So the workers' samples are disjoint, each epoch is
complete, and all workers have a batch for every step, whatever the size of the set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_EPOCHS_KEPT = 2


def mixed(*numbers: int) -> int:
    """64 well-mixed bits that depend on all numbers and their order (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _WORD)) + _GOLDEN & _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """An order of ``size`` items, sorted by a hash of their number, so that it does not depend on library versions."""
    keys = np.arange(size, dtype=np.uint64) + np.uint64(mixed(seed, epoch))
    keys *= np.uint64(_GOLDEN)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True, slots=True)
class EpochSample:
    """One sample of one epoch."""

    index: int
    epoch: int


@dataclass(slots=True)
class TrainingOrder:
    """The samples of one worker, step by step."""

    size: int
    batch: int
    """Samples per step on this worker."""
    worker: int
    workers: int
    seed: int
    _permutations: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch < 1 or not 0 <= self.worker < self.workers:
            raise ValueError(f"no order for {self}")

    @property
    def batch_size(self) -> int:
        """The largest number of samples per step."""
        return self.batch

    def places(self, step: int) -> list[EpochSample]:
        """The samples of this worker in ``step``."""
        first = (step * self.workers + self.worker) * self.batch
        return [self._place(position) for position in range(first, first + self.batch)]

    def _place(self, position: int) -> EpochSample:
        epoch, within = divmod(position, self.size)
        if epoch not in self._permutations:
            for old in sorted(self._permutations)[: 1 - _EPOCHS_KEPT]:
                del self._permutations[old]
            self._permutations[epoch] = permutation(self.size, self.seed, epoch)
        return EpochSample(int(self._permutations[epoch][within]), epoch)


@dataclass(frozen=True, slots=True)
class OnceThrough:
    """Every sample once, in the order of the set, with a smaller last batch: for evaluation."""

    size: int
    batch: int

    @property
    def batch_size(self) -> int:
        return self.batch

    @property
    def steps(self) -> int:
        """Batches of one pass."""
        return -(-self.size // self.batch)

    def places(self, step: int) -> list[EpochSample]:
        """The ``step``-th batch; passes follow one another."""
        first = step % self.steps * self.batch
        return [EpochSample(index, 0) for index in range(first, min(first + self.batch, self.size))]


@dataclass(frozen=True, slots=True)
class SameAgain:
    """One batch of another order, forever: what ``--datasets_repeat_cached_sample`` asks for."""

    order: TrainingOrder

    @property
    def batch_size(self) -> int:
        return self.order.batch

    def places(self, step: int) -> list[EpochSample]:  # noqa: ARG002 - that is the point
        return self.order.places(0)


Order = TrainingOrder | OnceThrough | SameAgain
