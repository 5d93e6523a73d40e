"""What a server's loop needs of whoever knows tensors: memory in, next version out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from lockstep.protocol.effects import Apply
from lockstep.protocol.messages import Layout
from lockstep.protocol.plan import Plan
from lockstep.runtime.tensor_file import NamedTensor

Done = Callable[[Exception | None], None]
"""Told what became of an update: nothing where it is done, else the error."""


@dataclass(slots=True)
class StoreTimes:
    """What a store has spent its thread's time on so far, in seconds."""

    reduce: float = 0.0
    update: float = 0.0
    buckets: int = 0


@runtime_checkable
class CountsTime(Protocol):
    """A store that can tell where its time went."""

    @property
    def times(self) -> StoreTimes: ...


@runtime_checkable
class TellsMemory(Protocol):
    """A store that can tell what it holds beside the two slots."""

    def memory(self) -> Mapping[str, int]:
        """Bytes by what they are for."""


class ShardStore(Protocol):
    """Holds one server's shard in two slots and makes versions. Called on one thread, never on the loop's."""

    def prepare(self, layout: Layout, plan: Plan, server: int, slots: tuple[memoryview, memoryview]) -> None:
        """The plan is known; ``slots`` are the two copies of the shard."""

    def apply(self, effect: Apply, gradients: Sequence[memoryview]) -> None:
        """Reduce ``gradients`` (in this order) and write the next version of the bucket."""

    def snapshot(self, version: int) -> list[NamedTensor]:
        """A copy of the whole shard at this version, optimizers included, that later updates do not touch."""

    def restore(self, folder: Path, shards: Sequence[str], slot: int) -> None:
        """Fill slot ``slot`` and the optimizers from the files of a checkpoint, of whatever number of servers.

        ValueError with a sentence where they do not hold all of it.
        """

    def answer(self, what: str, data: bytes) -> bytes:
        """Answer a worker's question; ValueError with a sentence where that cannot be done."""


@runtime_checkable
class AppliesLater(Protocol):
    """A store that only starts an update, on a GPU for instance, and tells when it is done."""

    def spare_bytes(self, plan: Plan) -> int:
        """So many bytes behind each of the two slots are its own."""

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        """As ``ShardStore.apply``; ``done`` is called once, on any thread. The gradients stay readable until then.

        Where those who read the version wait for the GPU by themselves, it is called when all is queued there.
        """

    def links_changed(self) -> None:
        """A worker has come, perhaps in another life: what was kept for memory that it lent before may be let go."""

    def close(self) -> None:
        """Nothing is applied any more: wait for what was begun, and let go of what this needed."""
