"""What must hold in a run with second homes, whatever is killed, cut or broken, and when (``docs/replication.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Role, Step, TaskId
from lockstep.protocol.core.messages import End
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.replication.replica_events import MakeVersion
from lockstep.protocol.replication.replica_messages import Members, ReplicaMessage, Stamped, StepCommitted, ViewOf
from lockstep.protocol.replication.replicated_server import ReplicatedServer
from lockstep.sim.violation import Rule, Violation

if TYPE_CHECKING:
    from lockstep.sim.replicas.world import ReplicaTask


class ReplicaJudge:
    """Knows every version that was ever known to a worker, every commit and every view, whoever said it."""

    def __init__(self, buckets: int, steps: int, tasks: Mapping[TaskId, ReplicaTask]) -> None:
        self.end_is_decided = False
        self.takeovers = 0
        self.must_complete = True
        """Whether every loss so far came while the job had said that its replica is whole."""
        self._buckets = buckets
        self._steps = steps
        self._tasks = tasks
        self._numbers: dict[tuple[BucketId, int], int] = {}
        self._views: dict[int, tuple[Placement, Members]] = {}
        self._committed: Step = INITIAL_STEP - 1

    # -- versions --

    def making(self, home: TaskId, effect: MakeVersion) -> None:
        """No step is made twice: what a worker may have is never made again by a home."""
        bucket, step = effect.update.bucket, effect.update.step
        if (bucket, step + 1) in self._numbers:
            raise Violation(Rule.APPLIED_TWICE, f"{home} makes step {step} of bucket {bucket}, which workers have")

    def known(self, home: TaskId, bucket: BucketId, version: int, number: int) -> None:
        """A home sends a worker this version."""
        first = self._numbers.setdefault((bucket, version), number)
        if first != number:
            raise Violation(Rule.NOT_REPEATED, f"version {version} of bucket {bucket} was {first}, now {number}")
        machine = self._tasks[home].machine
        assert isinstance(machine, ReplicatedServer)
        placement = machine.viewing.placement
        homes = placement.shards[placement.shard_of(bucket)]
        if homes.whole and homes.second_task is not None:
            self._must_be_held(homes.second_task, machine, bucket, version)

    def _must_be_held(self, second: TaskId, by: ReplicatedServer, bucket: BucketId, version: int) -> None:
        """Nothing is known that only one server has."""
        task = self._tasks[second]
        if not task.alive or task.life != by.viewing.members[second]:
            return
        assert isinstance(task.machine, ReplicatedServer)
        shard = by.viewing.placement.shard_of(bucket)
        copy, home = task.machine.copies.get(shard), task.machine.homes.get(shard)
        held = home.buckets[bucket].version if home else copy.held(bucket) if copy else INITIAL_STEP - 1
        if held < version:
            raise Violation(
                Rule.NOT_HELD,
                f"{by.task} lets a worker have version {version} of bucket {bucket}; {second} holds {held}",
            )

    # -- decisions --

    def said(self, task: TaskId, message: ReplicaMessage) -> None:
        match message:
            case ViewOf():
                self._on_view(task, message)
            case Stamped(message=StepCommitted(step=step)):
                self._on_committed(task, step)
            case End() as end:
                self.end_is_decided = self.end_is_decided or end.ok or not self.must_complete
                if not end.ok and self.must_complete:
                    raise Violation(Rule.BAD_END, f"{task} ends the job: {end.reason.text}")

    def _on_view(self, task: TaskId, view: ViewOf) -> None:
        """One view has one number, and no commit is taken back by the next."""
        decided = (view.placement, view.members)
        known = self._views.setdefault(view.number, decided)
        if known != decided:
            raise Violation(Rule.DECISION_CHANGED, f"view {view.number} of {task} is {decided}; it was {known}")
        former = self._views.get(view.number - 1)
        if former is not None and former[0].coordinator != view.placement.coordinator:
            self.takeovers += known is decided
        if view.committed < self._committed and view.number == max(self._views):
            raise Violation(
                Rule.COMMIT_TAKEN_BACK, f"view {view.number} has step {view.committed}, {self._committed} was committed"
            )

    def handled(self, task: ReplicaTask) -> None:
        """A coordinator tells itself of commits, too."""
        if isinstance(task.machine, ReplicatedServer):
            self._committed = max(self._committed, task.machine.committed)

    def _on_committed(self, task: TaskId, step: Step) -> None:
        self._committed = max(self._committed, step)
        machine = self._tasks[task].machine
        assert isinstance(machine, ReplicatedServer)
        assert machine.coordination is not None
        for bucket in range(self._buckets):
            homes = machine.coordination.placement.shards[machine.coordination.placement.shard_of(bucket)]
            self._must_be_made(homes.home_task, bucket, step)

    def _must_be_made(self, home: TaskId, bucket: BucketId, step: Step) -> None:
        task = self._tasks[home]
        if not task.alive or not isinstance(task.machine, ReplicatedServer) or not task.machine.homes:
            return
        shard = task.machine.homes.get(bucket % task.machine.shape.servers)
        if shard is not None and shard.buckets[bucket].version <= step:
            raise Violation(Rule.EARLY_COMMIT, f"step {step} is committed; {home} has not made bucket {bucket}")

    # -- losses, and the end --

    @property
    def has_begun(self) -> bool:
        """Whether there is a view that something can be lost of."""
        return bool(self._views)

    def killed(self, task: TaskId) -> None:
        """A loss of which nothing may be noticed but time, if the job had said that its replica is whole."""
        if task.role is Role.SERVER and not self.says_whole:
            self.must_complete = False

    @property
    def says_whole(self) -> bool:
        """Whether the newest view has only whole and live second homes; before the first one nothing can be lost."""
        if not self._views:
            return True
        placement, members = self._views[max(self._views)]
        servers = [(task, life) for task, life in members if task.role is Role.SERVER]
        return placement.whole and all(
            self._tasks[task].alive and self._tasks[task].life == life for task, life in servers
        )

    def completed(self) -> None:
        for bucket in range(self._buckets):
            if (bucket, self._steps) not in self._numbers:
                raise Violation(Rule.INCOMPLETE, f"the job ended well without version {self._steps} of bucket {bucket}")
        machines = [task.machine for task in self._tasks.values() if isinstance(task.machine, ReplicatedServer)]
        committed = max(machine.coordination.committed for machine in machines if machine.coordination is not None)
        if committed < self._steps - 1:
            raise Violation(Rule.INCOMPLETE, f"the job ended well with step {committed} committed")

    def final(self) -> tuple[tuple[BucketId, int], ...]:
        return tuple((b, self._numbers.get((b, self._steps), 0)) for b in range(self._buckets))
