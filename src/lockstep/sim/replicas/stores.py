"""The stores of servers in a simulated job: numbers stand for bytes, and are mixed of all that they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from lockstep.protocol.core.effects import Apply, CopyBucket, TakeBucket
from lockstep.protocol.core.events import BucketApplied, BucketTaken, MeanMade
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, TaskId
from lockstep.protocol.core.messages import BucketCopy
from lockstep.sim.violation import Rule

if TYPE_CHECKING:
    from lockstep.sim.replicas.world import ReplicaWorld


def mixed(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


@dataclass(slots=True)
class StoreMemory:
    """What one incarnation of a server has."""

    slots: dict[tuple[BucketId, int], tuple[int, int]] = field(default_factory=dict)
    """A version's number, and its value."""
    momentum: dict[BucketId, int] = field(default_factory=dict)
    means: dict[BucketId, list[int]] = field(default_factory=dict)
    """What was handed on last, where the second home reads it."""
    arrivals: dict[int, list[int]] = field(default_factory=dict)
    loans: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Means of other servers that are read here, and how to give them back."""

    def keep(self, number: int, cell: list[int], give_back: Callable[[], None] | None = None) -> int:
        self.arrivals[number] = cell
        if give_back is not None:
            self.loans[number] = give_back
        return number

    def give_back(self, arrival: int) -> None:
        self.arrivals.pop(arrival, None)
        if (loan := self.loans.pop(arrival, None)) is not None:
            loan()


class Stores:
    """The stores of all servers of a world."""

    def __init__(self, world: ReplicaWorld) -> None:
        self._world = world

    def copy(self, name: TaskId, effect: CopyBucket) -> None:
        """A bucket as it is goes to its second home, in two parts."""
        memory = self._world.tasks[name].store
        version, value = memory.slots[effect.bucket, effect.version % 2]
        wrong = f"{name} copies version {version}, not {effect.version}"
        self._world.must(version == effect.version, Rule.UNKNOWN_VERSION, wrong)
        data = f"{value} {memory.momentum.get(effect.bucket, 0)}".encode()
        half = len(data) // 2
        for offset, part in ((0, data[:half]), (half, data[half:])):
            told = BucketCopy(effect.bucket, version, offset, len(data), part, effect.edition)
            self._world.say(name, effect.peer, told)

    def take(self, name: TaskId, effect: TakeBucket) -> None:
        memory = self._world.tasks[name].store
        value, momentum = (int(number) for number in effect.data.split())
        memory.slots[effect.bucket, effect.version % 2] = (effect.version, value)
        memory.momentum[effect.bucket] = momentum
        self._world.handle(name, BucketTaken(effect.bucket, effect.version))

    def apply(self, name: TaskId, effect: Apply) -> None:
        """Make the mean, which a home hands on, and then the version."""
        world, task = self._world, self._world.tasks[name]
        cells = [task.store.arrivals.pop(number) for number in effect.arrivals]
        machine = task.machine.server
        is_again = (effect.bucket, effect.step + 1) in world.known
        is_home = machine is not None and effect.bucket in machine.buckets
        again = f"{name} makes version {effect.step + 1} of bucket {effect.bucket} again"
        world.must(not (is_home and is_again), Rule.APPLIED_TWICE, again)
        queue = ("later" if effect.in_background else "store", name)
        given = [tuple(cell) for cell in cells]
        mean = [mixed(given, effect.replicas, effect.scale, effect.limit)] if effect.hands_on else []
        cell = (mean if effect.hands_on else cells[0]) if cells else []

        def reduced() -> None:
            if effect.hands_on:
                task.store.means.setdefault(effect.bucket, [0])[:] = mean  # where the last one was
                world.handle(name, MeanMade(effect.bucket, effect.step))
            if task.alive:
                world.put(queue, partial(self._update, name, effect, cell))

        world.put(queue, reduced)

    def _update(self, name: TaskId, effect: Apply, mean: list[int]) -> None:
        """``mean``: read here and now, which shows if it has been overwritten; empty: there is none."""
        memory = self._world.tasks[name].store
        if effect.step == INITIAL_STEP or (effect.values and mean):
            value = mean[0]
        else:
            base, value = memory.slots[effect.bucket, effect.from_slot]
            wrong = f"{name} makes step {effect.step} of version {base}"
            self._world.must(base == effect.step, Rule.UNKNOWN_VERSION, wrong)
            if mean:
                moved = mixed(memory.momentum.get(effect.bucket, 0), mean, effect.rates, effect.without)
                memory.momentum[effect.bucket] = moved
                value = mixed(value, moved)
        memory.slots[effect.bucket, effect.to_slot] = (effect.step + 1, value)
        digest = str(mixed(value, memory.momentum.get(effect.bucket, 0))) if effect.digests else ""
        self._world.handle(name, BucketApplied(effect.bucket, effect.step, digest))
        for number in effect.arrivals:
            memory.give_back(number)
