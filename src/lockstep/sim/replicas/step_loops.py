"""The training loops of workers in a simulated job: steps of gradients that depend on everything a worker has."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lockstep.protocol.core.effects import BecameMember
from lockstep.protocol.core.events import Finished, Prepared, Produced, Sealed, StepBegun
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, TaskId
from lockstep.protocol.core.messages import GroupRates, Layout
from lockstep.sim.replicas.stores import mixed
from lockstep.sim.violation import Rule

if TYPE_CHECKING:
    from lockstep.sim.replicas.world import ReplicaWorld


@dataclass(slots=True)
class LoopMemory:
    """What one incarnation of a worker has."""

    values: dict[BucketId, tuple[int, int]] = field(default_factory=dict)
    """The newest version of each bucket: its number and its value."""
    incoming: dict[tuple[BucketId, int], int] = field(default_factory=dict)
    gradients: dict[BucketId, list[int]] = field(default_factory=dict)
    step: int = INITIAL_STEP
    busy: bool = False


def state_after(task: TaskId, step: int) -> bytes:
    """What a worker takes from this step into the next one."""
    return mixed(task, step).to_bytes(8, "big")


class StepLoops:
    """The loops of all workers of a world."""

    def __init__(self, world: ReplicaWorld) -> None:
        self._world = world

    def prepare(self, name: TaskId, member: BecameMember) -> None:
        world, loop = self._world, self._world.tasks[name].loop
        loop.step = member.start - 1 if member.start > INITIAL_STEP else INITIAL_STEP
        if member.start > 0 and member.state != state_after(name, member.start - 1):
            raise world.violation(Rule.NOT_REPEATED, f"{name} begins step {member.start} with another state")
        self.lay_out(name, member.start)

    def lay_out(self, name: TaskId, start: int) -> None:
        """Tell the layout; the chief's initial parameters follow."""
        world = self._world
        layout = Layout(world.plan.hash, world.bucket_bytes, world.parameters, (), start=start)
        world.handle(name, Prepared(world.plan, layout))
        if name == CHIEF and start == INITIAL_STEP:
            for bucket in world.plan.buckets:
                world.tasks[name].loop.gradients[bucket.id] = [mixed("initial", bucket.id)]
                world.handle(name, Produced(INITIAL_STEP, bucket.id))

    def has(self, name: TaskId, version: int) -> bool:
        values = self._world.tasks[name].loop.values
        return len(values) == len(self._world.plan.buckets) and all(known == version for known, _ in values.values())

    def go_on(self, name: TaskId) -> None:
        world, loop = self._world, self._world.tasks[name].loop
        version = loop.step + 1
        if loop.busy or not self.has(name, version):
            return
        loop.step = version
        if version >= world.steps:
            world.handle(name, Finished(world.steps))
            return
        loop.busy = True
        world.put(("train", name), partial(self._train, name, version))

    def _train(self, name: TaskId, step: int) -> None:
        world, task = self._world, self._world.tasks[name]
        rates = (GroupRates(("lr",), (0.1 / (step + 1),)),) if name == CHIEF else ()
        values = sorted(task.loop.values.items())
        world.handle(name, StepBegun(step, rates))
        if not task.alive:
            return
        for bucket in world.plan.buckets:
            task.loop.gradients[bucket.id] = [mixed(name, step, bucket.id, values)]
            world.put(("train", name), partial(world.handle, name, Produced(step, bucket.id)))
        world.put(("train", name), partial(self._seal, name, step))

    def _seal(self, name: TaskId, step: int) -> None:
        self._world.tasks[name].loop.busy = False
        self._world.handle(name, Sealed(step, (), (), state=state_after(name, step)))
        self.go_on(name)
