"""The share of a rank in torch: the next version of a bucket is the mean of the gradients of all ranks.

There is no optimizer here: every rank has its own, and gives it the mean. A bucket is processed in pieces that stay in
a cache while they are added up and divided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lockstep.protocol.core.effects import Apply, Measure
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, TaskId
from lockstep.protocol.core.messages import Layout, OptimizerEntry
from lockstep.protocol.core.plan import Bucket, Plan
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.task.store import Done, Found, StoreTimes
from lockstep.training.server.piece_pool import PiecePool
from lockstep.training.server.sgd import PIECE_BYTES, mean_of
from lockstep.training.tensors import as_tensor, torch_dtype
from lockstep.training.wire_format import WireFormat

MEAN = OptimizerEntry("mean", "{}")
CHIEFS = OptimizerEntry("chief", "{}")
"""What a layout says of a group of parameters, in place of an optimizer: that the mean of all ranks is made of them, or
that the chief's values count (of buffers, which the others do not send)."""

Save = Callable[[int], list[NamedTensor]]


def _nothing_to_save(version: int) -> list[NamedTensor]:
    raise ValueError(f"this rank has nothing to save of version {version}")


AnswerRank = Callable[[str, bytes], bytes]


def _no_answer(what: str, data: bytes) -> bytes:  # noqa: ARG001 - every store has this signature
    raise ValueError(f"a rank does not answer requests for {what!r}")


@dataclass(frozen=True, slots=True)
class OwnGradients:
    """A rank's gradients of its own share. Once their mean is made nobody needs them, and it is written over them while
    it is in the cache: that is where the program looks for it."""

    task: TaskId
    replaced: dict[BucketId, int]
    """The version of each bucket that has last been written there."""


class MeanStore:
    """Implements ``runtime.task.store.ShardStore``; all its calls come on one thread."""

    def __init__(
        self,
        wire: WireFormat | None = None,
        helpers: int = 0,
        save: Save = _nothing_to_save,
        answer: AnswerRank = _no_answer,
        own: OwnGradients | None = None,
    ) -> None:
        """``wire``: the format in which gradients arrive. ``helpers``: threads that take part. ``save``: what goes into
        a checkpoint of this version; the parameters are the program's, not the store's. ``answer``: what a rank that
        has come back is told. ``own``: where this rank's gradients are replaced by their means."""
        self.answer = answer
        self._own = own
        self._wire = wire or WireFormat()
        self._crew = PiecePool(helpers)
        self._save = save
        self._slots: dict[BucketId, tuple[Tensor, ...]] = {}
        self._buckets: dict[BucketId, Bucket] = {}
        self._chiefs: set[BucketId] = set()
        self.times = StoreTimes()

    def spare_bytes(self, plan: Plan) -> int:  # noqa: ARG002 - every store has this signature
        return 0

    def prepare(self, layout: Layout, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        for bucket in plan.buckets_of(server):
            where = slice(bucket.shard_offset, bucket.shard_offset + bucket.nbytes)
            self._buckets[bucket.id] = bucket
            self._slots[bucket.id] = tuple(as_tensor(slot[where], torch_dtype(bucket.dtype)) for slot in slots)
            if layout.optimizers and layout.optimizers[bucket.group] == CHIEFS:
                self._chiefs.add(bucket.id)

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        began = time.perf_counter()
        self._make(effect, gradients)
        self.times.reduce += time.perf_counter() - began
        self.times.buckets += 1
        done(None)

    def _make(self, effect: Apply, gradients: Sequence[memoryview]) -> None:
        bucket, new = self._buckets[effect.bucket], self._slots[effect.bucket][effect.to_slot]
        given = [as_tensor(one, self._wire.dtype_of(bucket, one.nbytes)) for one in gradients]
        if not given:
            new.zero_()
        elif effect.step == INITIAL_STEP or effect.values or bucket.id in self._chiefs:
            new.copy_(given[0])
        else:
            own = self._own_among(effect, given, new)
            self._average(given, effect.replicas, new, own if effect.replicas > 1 else None)
            if own is not None and self._own is not None:
                self._own.replaced[bucket.id] = effect.step + 1

    def _own_among(self, effect: Apply, given: Sequence[Tensor], new: Tensor) -> Tensor | None:
        """This rank's own gradient, if the mean fits in its place."""
        if self._own is None or self._own.task not in effect.contributors:
            return None
        own = given[effect.contributors.index(self._own.task)]
        return own if (own.dtype, own.shape) == (new.dtype, new.shape) else None

    def _average(self, given: Sequence[Tensor], count: int, new: Tensor, own: Tensor | None) -> None:
        elements = PIECE_BYTES // new.element_size()

        def make(piece: int, _thread: int) -> None:
            where = slice(piece * elements, (piece + 1) * elements)
            mean_of([gradient[where] for gradient in given], count, new[where], may_be_loan=False)
            if own is not None:
                own[where].copy_(new[where])

        self._crew.work_off(-(-new.numel() // elements), make)

    def measure(self, effect: Measure, gradients: Sequence[memoryview], found: Found) -> None:  # noqa: ARG002
        raise ValueError(f"a rank does not measure bucket {effect.bucket}: every rank has the whole mean")

    def links_changed(self) -> None:
        """Nothing is kept of what a rank has lent."""

    def memory(self) -> dict[str, int]:
        return {}

    def snapshot(self, version: int, buckets: Set[BucketId] | None = None) -> list[NamedTensor]:  # noqa: ARG002 - as every store
        return self._save(version)

    def restore(self, folder: Path, shards: Sequence[str], slot: int) -> None:
        """The program reads its parameters from the checkpoint; no mean of an earlier step is needed."""

    def close(self) -> None:
        """End the threads."""
        self._crew.close()


__all__ = ["CHIEFS", "MEAN", "MeanStore", "OwnGradients"]
