"""A job with second homes under a judge of what must hold, with cuts of its network and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, JobEnded, SaveShard, WriteCheckpoint
from lockstep.protocol.core.events import CheckpointWritten, Event, LinkLost, PeerGone, ShardSaved
from lockstep.protocol.core.ids import BucketId, Role, TaskId
from lockstep.protocol.core.messages import Saved
from lockstep.sim.replicas.judge import Judge
from lockstep.sim.replicas.world import ReplicaWorld
from lockstep.sim.violation import Rule

_EVENTS_BEFORE_A_CUT_HEALS = 25


class Cut(NamedTuple):
    """At its event number ``event``, ``one`` loses its link with each of ``others``, and stays without."""

    one: TaskId
    event: int
    others: tuple[TaskId, ...]
    heals: bool = True
    believed_dead: bool = False
    """The others are a majority, and take ``one`` for dead while it lives."""

    def severs(self, one: TaskId, other: TaskId) -> bool:
        return self.one in (one, other) and bool({one, other} & set(self.others))


class JudgedWorld(ReplicaWorld):
    """A run with a judge, in which links can be cut."""

    def __init__(self, seed: int = 0, servers: int = 2, workers: int = 2, steps: int = 2, buckets: int = 4) -> None:
        self.cut: Cut | None = None
        """One that is to be made."""
        self._cut: Cut | None = None
        self._is_cut = False
        self._at_cut: tuple[int, int] = (0, -9)
        self._shards: dict[tuple[int, str], dict[BucketId, int]] = {}
        self.checkpoints: dict[int, dict[BucketId, int]] = {}
        self.judging = Judge(self)
        self.may_end = False
        """A server was killed while the job did not have a replica of everything."""
        self.heard: dict[object, object] = {}
        """What workers were told outside of the steps, in a world whose workers ask for more."""
        super().__init__(seed, servers, workers, steps, buckets)

    def judge(self, name: TaskId, effects: Sequence[Effect]) -> None:
        self.judging.judge(name, effects)

    @property
    def is_whole(self) -> bool:
        """Whether a coordinator that knows all present servers says that any one of them may be lost."""
        servers = {name: task for name, task in self.tasks.items() if name.role is Role.SERVER}
        if not all(task.alive for task in servers.values()):
            return False
        lives = [(name, task.machine.incarnation) for name, task in servers.items()]
        machines = [task.machine.coordinator for task in self.tasks.values()]
        leading = [one for one in machines if isinstance(one, HomedCoordinator) and one.has_replica]
        return any(all(leads.is_member(*life) for life in lives) for leads in leading)

    def handle(self, name: TaskId, event: Event) -> None:
        is_hit = name.role is Role.SERVER and (name, self.tasks[name].events) in self.kills
        self.may_end = self.may_end or (is_hit and not self.is_whole)
        if self.cut is not None and name == self.cut.one and self.tasks[name].events == self.cut.event:
            self._make_cut(self.cut)
        super().handle(name, event)

    def judge_return(self, ends: Sequence[JobEnded]) -> None:
        """Of a bad end: with checkpoints everybody goes back to the newest one, without nobody does. Nor does a job
        that never began."""
        began = all(end.reason.cause is not Cause.NEVER_STARTED for end in ends)
        said = {end.again for end in ends}
        wrong = f"the job has ended, and whether all go back: {said}"
        self.must(said == {self.rules.returns and began}, Rule.BAD_END, wrong)

    # -- cuts --

    def is_over(self) -> bool:
        if self._cut is None:
            return super().is_over()
        # Nobody tells a server that was cut off of the end; that all workers leave is proof of it.
        return all(task.ended is not None for name, task in self.tasks.items() if name.role is Role.WORKER)

    def _make_cut(self, cut: Cut) -> None:
        self.trace.append((self.now, cut.one, f"IS CUT FROM {', '.join(map(str, cut.others))}"))
        self.cut, self._is_cut, self._cut = None, True, cut
        self._at_cut = (self.judging.newest_view, self.judging.committed)
        for other in cut.others:
            if Role.SERVER not in (other.role, cut.one.role):
                continue
            for here, there in ((cut.one, other), (other, cut.one)):
                self.forget(here, there)
                self.put((here, "from", there), partial(self.handle, here, LinkLost(there, "the network is cut")))
            if cut.believed_dead:
                gone = PeerGone(cut.one, Reason(Cause.DEAD, "most cannot reach it"), self.life(cut.one))
                self.put((other, "gone", cut.one), partial(self.handle, other, gone))
        if cut.heals:
            self.put(("heal", cut.one), partial(self._heal, cut, _EVENTS_BEFORE_A_CUT_HEALS))

    def _heal(self, cut: Cut, turns: int) -> None:
        """After many other events, or when nothing else can happen."""
        if turns and any(actions for queue, actions in self.queues.items() if queue != ("heal", cut.one)):
            self.put(("heal", cut.one), partial(self._heal, cut, turns - 1))
            return
        self._is_cut = False
        for other in cut.others:
            both = (self.tasks[other], self.tasks[cut.one])
            if Role.SERVER in (other.role, cut.one.role) and all(one.takes_part for one in both):
                self.link(cut.one, other)

    def counts_as_dead(self, task: TaskId) -> bool:
        return self._cut is not None and self._cut.believed_dead and self._cut.one == task

    def reaches(self, name: TaskId, peer: TaskId) -> bool:
        severed = self._is_cut and self._cut is not None and self._cut.severs(name, peer)
        return not severed and super().reaches(name, peer)

    @property
    def steps_since_cut(self) -> int:
        """How many steps have been committed since the cut."""
        return self.judging.committed - self._at_cut[1]

    @property
    def views_since_cut(self) -> int:
        return self.judging.newest_view - self._at_cut[0]

    # -- checkpoints --

    def carry_out(self, name: TaskId, effects: Sequence[Effect]) -> None:
        super().carry_out(name, effects)
        for effect in effects:
            match effect:
                case SaveShard():
                    self._keep_shard(name, effect)
                case WriteCheckpoint():
                    self.put(("disk", name), partial(self._write_checkpoint, name, effect))

    def _keep_shard(self, name: TaskId, effect: SaveShard) -> None:
        memory = self.tasks[name].store
        kept: dict[BucketId, int] = {}
        for bucket in effect.buckets:
            version, kept[bucket] = memory.slots[bucket, effect.version % 2]
            wrong = f"{name} saves version {version}, not {effect.version}"
            self.must(version == effect.version, Rule.UNKNOWN_VERSION, wrong)
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
            wrong = f"a shard of version {effect.version} is not what was reported"
            self.must(str(sorted(kept.items())) == shard.digest, Rule.WRONG_BYTES, wrong)
            found |= kept
        wrong = f"the checkpoint of version {effect.version} has {len(found)} buckets"
        self.must(len(found) == len(self.plan.buckets), Rule.INCOMPLETE, wrong)
        self.checkpoints[effect.version] = found
        self.handle(name, CheckpointWritten(effect.version))
