"""The servers that a job with second homes has lost, and where everything lives without them."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.protocol.core.ids import ClusterShape, Incarnation, Step, TaskId
from lockstep.protocol.core.placement import Homes, Placement


class ServerLosses:
    """The coordinator's record of it."""

    def __init__(self, shape: ClusterShape, placement: Placement | None = None, alive: Iterable[TaskId] = ()) -> None:
        self.placement = placement or Placement.at_start(shape.servers)
        self._alive = {task.index for task in alive or shape.server_ids()}
        self._former: set[tuple[TaskId, Incarnation]] = set()

    @property
    def homes(self) -> tuple[TaskId, ...]:
        """The servers that make versions, each once, in the order of their shards."""
        return tuple(dict.fromkeys(homes.home_task for homes in self.placement.shards))

    @property
    def savers(self) -> tuple[TaskId, ...]:
        """The tasks that write a checkpoint's shards."""
        return self.homes

    @property
    def decisions(self) -> tuple[Homes, ...]:
        return (self.placement.coordination,)

    def lose(self, task: TaskId, life: Incarnation) -> bool:
        """Whether the job goes on: everything that this server was the home of has a second home that is whole."""
        self._alive.discard(task.index)
        self._former.add((task, life))
        placement = self.placement.after(frozenset(self._alive))
        if placement is None:
            return False
        self.placement = placement
        return True

    def come_back(self, task: TaskId) -> None:
        """A next incarnation: it becomes the second home of what has none."""
        self._alive.add(task.index)
        placement = self.placement.after(frozenset(self._alive))
        assert placement is not None, "a server more cannot make anything lost"
        self.placement = placement

    def shard_is_whole(self, shard: int, home: TaskId) -> bool:
        """Whether that is news, and said by its home."""
        homes = self.placement.shards[shard] if shard < len(self.placement.shards) else None
        if homes is None or homes.whole or homes.second_task is None or homes.home_task != home:
            return False
        self.placement = self.placement.with_whole_shard(shard)
        return True

    def deputy_is_whole(self) -> None:
        self.placement = self.placement.with_whole_deputy()

    def has_ended(self, task: TaskId, life: Incarnation) -> bool:
        return (task, life) in self._former

    def applied_before(self, committed: Step) -> dict[TaskId, Step]:
        """What a new view knows of its homes: they have made what is committed, and say again what they have made."""
        return dict.fromkeys(self.homes, committed)
