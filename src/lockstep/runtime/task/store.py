"""What a server's loop needs from the code that knows tensors: memory in, next version out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from lockstep.protocol.core.effects import Apply, Measure
from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.messages import Layout
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.checkpoint.tensor_file import NamedTensor

Done = Callable[[Exception | None], None]
"""Called with the error of an update, or None if it succeeded."""
Found = Callable[[float, Exception | None], None]
"""Called with a norm, or with the error that kept the store from finding it."""


@dataclass(slots=True)
class StoreTimes:
    """Where the time of a store's thread has gone so far, in seconds."""

    reduce: float = 0.0
    update: float = 0.0
    buckets: int = 0


class ShardStore(Protocol):
    """Holds one server's shard in slots of equal size and makes versions. Called on one thread, never on the loop's."""

    @property
    def times(self) -> StoreTimes:
        """Where its time has gone. Read on any thread."""

    def spare_bytes(self, plan: Plan) -> int:
        """How many bytes it needs for itself after each slot."""

    def prepare(self, layout: Layout, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        """The plan is known; each of ``slots`` has room for the shard: one where versions are overwritten,
        otherwise two, or more in asynchronous training."""

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        """Reduce ``gradients`` (in this order) and write the next version of the bucket, here or, later, on a GPU.

        ``done`` is called once, on any thread. The gradients stay readable until then. If the readers of the version
        wait for the GPU themselves, it is called once everything is queued there.
        """

    def measure(self, effect: Measure, gradients: Sequence[memoryview], found: Found) -> None:
        """Find the norm of the mean of ``gradients``, which are only read. ``found`` is called once, on any thread."""

    def links_changed(self) -> None:
        """A worker has joined, perhaps in a new incarnation: memory that it lent before no longer needs to be kept."""

    def memory(self) -> Mapping[str, int]:
        """Bytes that it holds beside the slots, by purpose. Called on any thread."""

    def snapshot(self, version: int, buckets: Set[BucketId] | None = None) -> list[NamedTensor]:
        """A copy of these buckets, or of all, at this version, optimizers included, that later updates do not touch."""

    def restore(self, folder: Path, shards: Sequence[str], slot: int) -> None:
        """Fill slot ``slot`` and the optimizers from the files of a checkpoint, from any number of servers.

        ValueError with a sentence if they are incomplete.
        """

    def answer(self, what: str, data: bytes) -> bytes:
        """Answer a worker's question; ValueError with a sentence if that is not possible."""

    def close(self) -> None:
        """No more updates come: wait for those that were begun, and free everything."""


@runtime_checkable
class HandsOnMeans(ShardStore, Protocol):
    """A store whose buckets can have second homes."""

    def begin_and_keep(
        self, effect: Apply, gradients: Sequence[memoryview], mean: memoryview, whole: Callable[[], None], done: Done
    ) -> None:
        """As ``begin``. What is applied, the mean of ``gradients``, clipped, as wide as the bucket, is written to
        ``mean``, and the version is made of these bytes. ``whole`` is called once, on any thread, when all of them are
        there: before ``done``, and perhaps long before it. Parameters without a gradient have no bytes there."""

    def copy_out(self, bucket: BucketId, version: int) -> bytes:
        """This version of a bucket, with its optimizer's state."""

    def take_in(self, bucket: BucketId, version: int, data: bytes) -> None:
        """What ``copy_out`` of the bucket's home has made. ValueError with a sentence if it is something else."""

    def digest(self, bucket: BucketId, version: int) -> str:
        """Of this version of a bucket and of its optimizer's state."""
