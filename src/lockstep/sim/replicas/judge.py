"""What must hold in a job with second homes, whatever is lost: looked at after every event, before its effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.core.effects import Effect, Send, SendVersion
from lockstep.protocol.core.ids import NOTHING_TO_APPLY, BucketId, JobId, TaskId
from lockstep.protocol.core.messages import Commit, Resolution, View
from lockstep.protocol.server.homed_machine import HomedServerMachine
from lockstep.sim.violation import Rule

if TYPE_CHECKING:
    from lockstep.sim.replicas.world import ReplicaTask, ReplicaWorld

_NONE = -9
"""Less than any step or version."""


class Judge:
    """Remembers what was said, and compares."""

    def __init__(self, world: ReplicaWorld) -> None:
        self._world = world
        self._job: JobId = 0
        self._views: dict[int, tuple[object, ...]] = {}
        self.committed = _NONE
        self.took_over = False
        """Another server has coordinated than at the start."""
        self.overtook = 0
        """How many resolutions were allowed to overtake other messages."""

    @property
    def newest_view(self) -> int:
        return max(self._views, default=0)

    def judge(self, name: TaskId, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message=View() as view):
                    self._judge_view(view)
                case Send(message=Commit() as commit):
                    self._judge_commit(name, commit)
                case Send(message=Resolution() as told, overtakes=True):
                    self._judge_overtaking(effect.peer, told)
                case SendVersion():
                    self._judge_version(name, effect)
        role = self._world.tasks[name].machine.role
        is_once = not isinstance(role, HomedServerMachine) or not role.made_twice
        self._world.must(is_once, Rule.APPLIED_TWICE, f"{name} made a version twice")

    def _judge_view(self, view: View) -> None:
        """Two views never have the same number: two servers never both go on. And no commit is taken back. If all is
        lost that knew of a job before anybody began, the cluster forms again, for another job."""
        if view.job != self._job:
            is_first = self.committed == _NONE
            self._world.must(is_first, Rule.COMMIT_TAKEN_BACK, "another job begins after a step was committed")
            self._job, self._views = view.job, {}
        said = (view.shards, view.decisions, view.members)
        is_same = self._views.setdefault(view.number, said) == said
        self._world.must(is_same, Rule.DECISION_CHANGED, f"two views have the number {view.number}")
        self.took_over = self.took_over or view.decisions[0].home != 0
        takes_back = view.start <= self.committed != NOTHING_TO_APPLY
        wrong = f"view {view.number} takes back the commit of step {self.committed}"
        self._world.must(not takes_back, Rule.COMMIT_TAKEN_BACK, wrong)

    def _judge_overtaking(self, peer: TaskId, told: Resolution) -> None:
        """A resolution overtakes nothing that it belongs to: the deputy has the one before, and its calls. A deputy
        that is lost, or new, does not get it."""
        self.overtook += 1
        there = self._world.tasks[peer]
        deputy = there.machine.deputy
        if not there.alive or deputy is None or deputy.held is None:
            return
        lacks_calls = deputy.calls_held < told.calls
        is_apart = bool(told.joins) or deputy.held.number < told.number - 1 or lacks_calls
        wrong = f"resolution {told.number} overtakes what it belongs to"
        self._world.must(not is_apart, Rule.DECISION_CHANGED, wrong)

    def _judge_commit(self, name: TaskId, commit: Commit) -> None:
        """A step is committed when every bucket's next version is held, by both homes while there are two. Of those
        that have been lost meanwhile nothing is asked. Who has been replaced commits nothing more."""
        world = self._world
        leads = world.tasks[name].machine.coordinator
        assert isinstance(leads, HomedCoordinator)
        is_old = commit.step > self.committed and leads.is_here().view < self.newest_view
        world.must(not is_old, Rule.EARLY_COMMIT, f"{name} commits step {commit.step} in an old view")
        self.committed = max(self.committed, commit.step)
        placement = leads.servers.placement
        for bucket in world.plan.buckets:
            homes = placement.shards[placement.shard_of(bucket.id)]
            named = [homes.home_task, homes.second_task if homes.whole else None]
            asked = [world.tasks[one] for one in named if one is not None]
            held = [self._newest(one, bucket.id) > commit.step for one in asked if self._is_known(leads, one)]
            wrong = f"step {commit.step} is committed without bucket {bucket.id}"
            world.must(all(held) or self.committed == NOTHING_TO_APPLY, Rule.EARLY_COMMIT, wrong)

    @staticmethod
    def _is_known(leads: HomedCoordinator, task: ReplicaTask) -> bool:
        """Whether this incarnation lives, and the coordinator has taken it in."""
        return task.takes_part and leads.is_member(task.machine.task, task.machine.incarnation)

    def _judge_version(self, name: TaskId, sent: SendVersion) -> None:
        """A version that a worker gets is held by both homes, if the second one is whole and lives."""
        machine = self._world.tasks[name].machine.server
        assert isinstance(machine, HomedServerMachine)
        homes, second = machine.places.of(sent.bucket), machine.places.second_life(sent.bucket)
        if not homes.whole or second is None:
            return
        there = self._world.tasks[second[0]]
        is_there = there.takes_part and there.machine.incarnation == second[1]
        is_held = not is_there or self._newest(there, sent.bucket) >= sent.version
        wrong = f"version {sent.version} of bucket {sent.bucket} is known and not held"
        self._world.must(is_held, Rule.NOT_HELD, wrong)

    def _newest(self, task: ReplicaTask, bucket: BucketId) -> int:
        """The newest version that it has made, or has all that it needs for."""
        slots = task.store.slots
        newest = max((slots[bucket, slot][0] for slot in (0, 1) if (bucket, slot) in slots), default=_NONE)
        machine = task.machine.server
        assert isinstance(machine, HomedServerMachine)
        for update, arrival in machine.held(bucket):
            if update.step == newest and (arrival in task.store.loans or not update.mean):
                newest += 1
        return newest
