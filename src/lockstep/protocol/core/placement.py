"""Where each shard lives: its home, its second home, and whether that one holds everything.

A placement belongs to a view. The next one is a pure function of it and of the servers that are left, so a coordinator
and the one that takes its place cannot disagree about it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from lockstep.protocol.core.ids import BucketId, TaskId, server, worker

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Homes:
    """The server that is responsible, and the one that could be at once."""

    home: int
    second: int = NOBODY
    whole: bool = False
    """The second home holds everything, and nothing is made known that it does not hold."""
    ranks: bool = False
    """Both are ranks of a job without servers."""

    @property
    def home_task(self) -> TaskId:
        return self._named(self.home)

    @property
    def second_task(self) -> TaskId | None:
        return None if self.second == NOBODY else self._named(self.second)

    def _named(self, index: int) -> TaskId:
        return worker(index) if self.ranks else server(index)

    def after(self, alive: Set[int]) -> Homes | None:
        """With the servers that are left; None: neither home is, or the second one does not hold everything."""
        if self.home in alive:
            return self if self.second in alive else self._with_second_of(alive)
        if not self.whole or self.second not in alive:
            return None
        return Homes(self.second, ranks=self.ranks)._with_second_of(alive)

    def _with_second_of(self, alive: Set[int]) -> Homes:
        others = sorted(alive - {self.home}, key=lambda index: (index < self.home, index))
        return Homes(self.home, others[0] if others else NOBODY, ranks=self.ranks)


@dataclass(frozen=True, slots=True)
class Placement:
    """The homes of all shards, and of the coordinator's decisions."""

    shards: tuple[Homes, ...]
    coordination: Homes
    """``home`` coordinates; ``second`` is the deputy, which holds every decision before it takes effect."""

    @classmethod
    def at_start(cls, servers: int) -> Placement:
        """Nothing has been made yet, so every second home holds everything."""
        homes = tuple(Homes(index, (index + 1) % servers, whole=True) for index in range(servers))
        return cls(homes, homes[0])

    @classmethod
    def of_ranks(cls) -> Placement:
        """Without servers: a rank's share stays with the rank, and only the decisions have a second home."""
        return cls((), Homes(0, 1, whole=True, ranks=True))

    @property
    def coordinator(self) -> TaskId:
        return self.coordination.home_task

    @property
    def deputy(self) -> TaskId | None:
        return self.coordination.second_task

    @property
    def whole(self) -> bool:
        """Whether the job survives the loss of any one server."""
        return self.coordination.whole and all(homes.whole for homes in self.shards)

    def after(self, alive: Set[int]) -> Placement | None:
        """With the servers that are left; None: something is lost with both of its homes."""
        shards = [homes.after(alive) for homes in self.shards]
        coordination = self.coordination.after(alive)
        if coordination is None or any(homes is None for homes in shards):
            return None
        return Placement(tuple(homes for homes in shards if homes is not None), coordination)

    def with_whole_shard(self, shard: int) -> Placement:
        homes = replace(self.shards[shard], whole=True)
        return replace(self, shards=(*self.shards[:shard], homes, *self.shards[shard + 1 :]))

    def with_whole_deputy(self) -> Placement:
        return replace(self, coordination=replace(self.coordination, whole=True))

    def shard_of(self, bucket: BucketId) -> int:
        return bucket % len(self.shards)

    def home_of(self, bucket: BucketId) -> TaskId:
        return self.shards[self.shard_of(bucket)].home_task

    def homes(self) -> frozenset[int]:
        """The servers that are the home of a shard."""
        return frozenset(homes.home for homes in self.shards)

    def buckets_of(self, shard: int, buckets: int) -> range:
        """Of ``buckets`` in all, those of this shard."""
        return range(shard, buckets, len(self.shards))
