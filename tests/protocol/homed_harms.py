"""Kills, cuts and checkpoints in the world of machines with second homes, and a judge of what must hold."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, SaveShard, Send, SendVersion, WriteCheckpoint
from lockstep.protocol.core.events import CheckpointWritten, Event, LinkLost, PeerGone, ShardSaved
from lockstep.protocol.core.ids import NOTHING_TO_APPLY, BucketId, Role, TaskId
from lockstep.protocol.core.messages import Commit, Resolution, Saved, View
from lockstep.protocol.server.homed_machine import HomedServerMachine

from .homed_world import HomedTask, HomedWorld

SAVING = RecoveryRules(
    on_worker_loss=LossPolicy.WAIT, server_replicas=1, returns=True, save_steps=1, saves_last=True, rejoin_seconds=300.0
)


class BrokenRuleError(AssertionError):
    """Something that must hold does not."""


class Cut(NamedTuple):
    """At its event number ``event``, ``one`` loses its link with each of ``others``, and stays without."""

    one: TaskId
    event: int
    others: tuple[TaskId, ...]
    heals: bool = True
    believed_dead: bool = False
    """The others are a majority, and take ``one`` for dead while it lives."""


class HarmedWorld(HomedWorld):
    """A run with a judge, in which links can be cut."""

    def __init__(self, seed: int = 0, servers: int = 2, workers: int = 2, steps: int = 2, buckets: int = 4) -> None:
        self.cut: Cut | None = None
        self._cut: Cut | None = None
        self._is_cut = False
        self._views: dict[int, tuple[object, ...]] = {}
        self._committed = -9
        self._at_cut: tuple[int, int] = (0, -9)
        self._shards: dict[tuple[int, str], dict[BucketId, int]] = {}
        self.checkpoints: dict[int, dict[BucketId, int]] = {}
        self.overtook = 0
        """How many resolutions were allowed to overtake other messages."""
        self.heard: dict[object, object] = {}
        """What workers were told outside of the steps (``homed_library.py``)."""
        super().__init__(seed, servers, workers, steps, buckets)

    # -- the judge: after every event, with what follows from it --

    def judge(self, name: TaskId, effects: list[Effect]) -> None:
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
        role = self.tasks[name].machine.role
        if isinstance(role, HomedServerMachine) and role.made_twice:
            raise BrokenRuleError(f"{name} made a version twice\n{self.story()}")

    def _judge_view(self, view: View) -> None:
        """Two views never have the same number: two servers never both go on. And no commit is taken back."""
        said = (view.shards, view.decisions, view.members)
        if self._views.setdefault(view.number, said) != said:
            raise BrokenRuleError(f"two views have the number {view.number}\n{self.story()}")
        if view.start <= self._committed != NOTHING_TO_APPLY:
            raise BrokenRuleError(f"view {view.number} takes back the commit of step {self._committed}\n{self.story()}")

    def _judge_overtaking(self, peer: TaskId, told: Resolution) -> None:
        """A resolution overtakes nothing that it belongs to: the deputy has the one before, and its calls. A deputy
        that is lost, or new, does not get it."""
        self.overtook += 1
        deputy = self.tasks[peer].machine.deputy
        if not self.tasks[peer].alive or deputy is None or deputy.held is None:
            return
        if told.joins or deputy.held.number < told.number - 1 or deputy._calls.complete < told.calls:
            raise BrokenRuleError(f"resolution {told.number} overtakes what it belongs to\n{self.story()}")

    def _judge_commit(self, name: TaskId, commit: Commit) -> None:
        """A step is committed when every bucket's next version is held, by both homes while there are two. Who has
        been replaced commits nothing more."""
        leads = self.tasks[name].machine.coordinator
        assert isinstance(leads, HomedCoordinator)
        newest = max(self._views, default=0)
        if commit.step > self._committed and leads._number < newest:
            raise BrokenRuleError(f"{name} commits step {commit.step} in an old view\n{self.story()}")
        self._committed = max(self._committed, commit.step)
        for bucket in self.plan.buckets:
            held = [self._version(task, bucket.id) for n, task in self.tasks.items() if n.role is Role.SERVER]
            if self._committed != NOTHING_TO_APPLY and max(held) <= commit.step:
                raise BrokenRuleError(f"step {commit.step} is committed without bucket {bucket.id}\n{self.story()}")

    def _judge_version(self, name: TaskId, sent: SendVersion) -> None:
        """A version that a worker gets is held by both homes, if the second one is whole and lives."""
        machine = self.tasks[name].machine.server
        assert isinstance(machine, HomedServerMachine)
        homes, second = machine.places.of(sent.bucket), machine.places.second_life(sent.bucket)
        if not homes.whole or second is None:
            return
        there = self.tasks[second[0]]
        is_there = there.alive and there.ended is None and there.machine.incarnation == second[1]
        if is_there and self._version(there, sent.bucket) < sent.version:
            raise BrokenRuleError(
                f"version {sent.version} of bucket {sent.bucket} is known and not held\n{self.story()}"
            )

    def _version(self, task: HomedTask, bucket: BucketId) -> int:
        """The newest one that it has made, or has all that it needs for."""
        newest = max((task.slots[bucket, slot][0] for slot in (0, 1) if (bucket, slot) in task.slots), default=-9)
        machine = task.machine.server
        assert isinstance(machine, HomedServerMachine)
        second = machine._seconds.buckets.get(bucket)
        for update, arrival in () if second is None else second.held:
            if update.step == newest and (arrival in task.loans or not update.mean):
                newest += 1
        return newest

    # -- cuts --

    def handle(self, name: TaskId, event: Event) -> None:
        if self.cut is not None and name == self.cut.one and self.tasks[name].events == self.cut.event:
            self._make_cut(self.cut)
        super().handle(name, event)

    def is_over(self) -> bool:
        if self._cut is None:
            return super().is_over()
        # Nobody tells a server that was cut off of the end; that all workers leave is proof of it.
        return all(task.ended is not None for name, task in self.tasks.items() if name.role is Role.WORKER)

    def _make_cut(self, cut: Cut) -> None:
        self.trace.append(f"{self.now:.4f} {cut.one.short} IS CUT FROM {', '.join(map(str, cut.others))}")
        self.cut, self._is_cut, self._cut = None, True, cut
        self._at_cut = (max(self._views, default=0), self._committed)
        for other in cut.others:
            if Role.SERVER not in (other.role, cut.one.role):
                continue
            for here, there in ((cut.one, other), (other, cut.one)):
                self.queues.pop((here, "from", there), None)
                self.queues.pop((here, "tensors", there), None)
                self.put((here, "from", there), partial(self.handle, here, LinkLost(there, "the network is cut")))
            if cut.believed_dead:
                gone = PeerGone(cut.one, Reason(Cause.DEAD, "most cannot reach it"), self._life(cut.one))
                self.put((other, "gone", cut.one), partial(self.handle, other, gone))
        if cut.heals:
            self.put(("heal", cut.one), partial(self._heal, 25))

    def _counts_as_dead(self, task: TaskId) -> bool:
        return self._cut is not None and self._cut.believed_dead and self._cut.one == task

    def _life(self, task: TaskId) -> int:
        return self.tasks[task].machine.incarnation

    def _heal(self, turns: int) -> None:
        """After many other events, or when nothing else can happen."""
        assert self._cut is not None
        if turns and any(actions for queue, actions in self.queues.items() if queue != ("heal", self._cut.one)):
            self.put(("heal", self._cut.one), partial(self._heal, turns - 1))
            return
        self._is_cut = False
        for other in self._cut.others:
            both = (self.tasks[other], self.tasks[self._cut.one])
            if Role.SERVER in (other.role, self._cut.one.role) and all(one.alive and one.ended is None for one in both):
                self._link(self._cut.one, other)

    def _reaches(self, name: TaskId, peer: TaskId) -> bool:
        cut = self._cut if self._is_cut else None
        severed = cut is not None and cut.one in (name, peer) and bool({name, peer} & set(cut.others))
        return not severed and super()._reaches(name, peer)

    @property
    def steps_since_cut(self) -> int:
        """How many steps have been committed since the cut."""
        return self._committed - self._at_cut[1]

    @property
    def views_since_cut(self) -> int:
        return max(self._views, default=0) - self._at_cut[0]

    # -- checkpoints --

    def _carry_out(self, name: TaskId, effects: list[Effect]) -> None:
        super()._carry_out(name, effects)
        for effect in effects:
            match effect:
                case SaveShard():
                    self._keep_shard(name, effect)
                case WriteCheckpoint():
                    self.put(("disk", name), partial(self._write_checkpoint, name, effect))

    def _keep_shard(self, name: TaskId, effect: SaveShard) -> None:
        task = self.tasks[name]
        kept: dict[BucketId, int] = {}
        for bucket in effect.buckets:
            version, kept[bucket] = task.slots[bucket, effect.version % 2]
            assert version == effect.version, f"{name} saves version {version}, not {effect.version}"
        file = f"shard-{name.index}"

        def written() -> None:
            self._shards[effect.version, file] = kept
            self.handle(name, ShardSaved(Saved(effect.version, file, len(kept), str(sorted(kept.items())))))

        self.put(("disk", name), written)

    def _write_checkpoint(self, name: TaskId, effect: WriteCheckpoint) -> None:
        if not self.tasks[name].alive:
            return
        problem = next((shard.problem for shard in effect.shards if shard.problem), "")
        if problem:
            self.handle(name, CheckpointWritten(effect.version, problem))
            return
        found: dict[BucketId, int] = {}
        for shard in effect.shards:
            kept = self._shards[effect.version, shard.file]
            if str(sorted(kept.items())) != shard.digest:
                raise BrokenRuleError(f"a shard of version {effect.version} is not what was reported\n{self.story()}")
            found |= kept
        if len(found) != len(self.plan.buckets):
            raise BrokenRuleError(
                f"the checkpoint of version {effect.version} has {len(found)} buckets\n{self.story()}"
            )
        self.checkpoints[effect.version] = found
        self.handle(name, CheckpointWritten(effect.version))

    def kill(self, name: TaskId) -> None:
        super().kill(name)
        self.queues.pop(("disk", name), None)
