"""The rest of a simulated server: its memory, its store, and how it carries out the effects of its machines."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.core.effects import (
    Apply,
    BecameMember,
    Effect,
    GiveBack,
    GrantRegion,
    Measure,
    Prepare,
    SaveShard,
    SendVersion,
    WriteCheckpoint,
)
from lockstep.protocol.core.events import (
    BucketApplied,
    BucketMeasured,
    CheckpointWritten,
    GradientArrived,
    Prepared,
    ShardSaved,
    TensorKind,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Incarnation, JobId, Step, TaskId
from lockstep.protocol.core.messages import Grant, Layout, Saved
from lockstep.protocol.core.plan import Plan
from lockstep.sim.clipping import norm_of
from lockstep.sim.context import SimulationContext, own_ticket, ticket_for
from lockstep.sim.disk import SavedBucket, SavedShard
from lockstep.sim.memory import Cell, GradientTag, VersionTag
from lockstep.sim.numbers import mixed
from lockstep.sim.oracle import Oracle
from lockstep.sim.scenario import SecondsRange
from lockstep.sim.transfers import Copy, Lanes, OwnLoan, Parcel, SimulatedLoan
from lockstep.sim.violation import Rule, Violation


@dataclass(frozen=True, slots=True)
class LentCell:
    """A gradient (or, of this task's own, a version) that has not been given back: where its bytes are, and the loan
    if they are the sender's."""

    life: Incarnation
    """The incarnation that sent it."""
    cell: Cell
    loan: SimulatedLoan | OwnLoan | None

    def release(self) -> None:
        if self.loan is not None:
            self.loan.release()


Where = Cell | SimulatedLoan | OwnLoan


class SimulatedServer:
    """One server without its machines."""

    def __init__(self, task: TaskId, around: SimulationContext) -> None:
        self.task = task
        self.arrivals: dict[int, LentCell] = {}
        self._around = around
        self._plan: Plan | None = None
        self._shard_bytes = 0
        self._numbered = 0
        self._job: JobId = 0
        self._momentum: dict[BucketId, int] = {}
        """The optimizer's state, which an update changes in place."""
        self._copies: dict[tuple[BucketId, int], list[Copy]] = {}
        self._lanes = Lanes()
        self._place = around.rng.place()
        self._draws = 0
        self.store_free_at = 0.0
        self.store_busy = 0.0
        """Seconds that the store has worked."""
        self.slowed: tuple[Step, float] | None = None
        """The step from which updates are slower, and by how much (a planted fault)."""
        self.slow_is_busy = True
        self.applying: tuple[Apply, float] | None = None
        """The update that the store is working on, and since when."""

    def became_member(self, effect: BecameMember) -> None:
        self._job = effect.job

    @property
    def _slot_count(self) -> int:
        return 1 if self._around.scenario.overwrites else 2

    @property
    def _oracle(self) -> Oracle:
        return self._around.oracles[self._job]

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Prepare(layout=layout):
                # The chief is a member. News of that may reach this server before its own view does.
                self._job = self._job or self._around.job_of(CHIEF)
                self._around.after(
                    self.task, self._seconds(self._around.scenario.training.prepare), lambda: self._prepare(layout)
                )
            case GrantRegion(peer=peer):
                self._grant(peer)
            case SendVersion():
                self._send_version(effect)
            case Apply():
                self._begin_apply(effect)
            case Measure():
                self._begin_measuring(effect)
            case GiveBack(arrival=arrival):
                self.arrivals.pop(arrival).release()
            case SaveShard(version=version):
                shard = self._kept(version)
                self._around.after(self.task, self._save_seconds(), lambda: self._write_shard(version, shard))
            case WriteCheckpoint():
                self._around.after(self.task, self._save_seconds(), lambda: self._write_checkpoint(effect))
            case _:
                raise TypeError(f"a server does not carry out {effect}")

    def _seconds(self, span: SecondsRange) -> float:
        self._draws += 1
        return self._around.rng.seconds_at(span, self._place, self._draws)

    # -- memory --

    def _prepare(self, layout: Layout) -> None:
        self._plan = self._around.plan(layout.parameters, layout.bucket_bytes)
        self._shard_bytes = self._plan.shard_room(self.task.index)
        if layout.start > INITIAL_STEP:
            self._load(self._plan, layout)
        self._around.handle(self.task, Prepared(self._plan))

    def _grant(self, peer: TaskId) -> None:
        assert self._plan is not None
        if peer == self.task:
            self._around.tell_itself(peer, Grant(own_ticket(self._shard_bytes)))
            return
        link = self._around.network.link(self.task, peer)
        link.send(self.task, Grant(ticket_for(link, self._shard_bytes)))

    def _load(self, plan: Plan, layout: Layout) -> None:
        saved = self._around.disk.checkpoints[int(layout.checkpoint)].buckets
        for bucket in plan.buckets_of(self.task.index):
            slot = self._around.memory.slot(self.task, bucket.id, layout.start % self._slot_count)
            for half in (0, 1):
                slot.write(half, saved[bucket.id].tag)
            self._momentum[bucket.id] = saved[bucket.id].momentum

    # -- checkpoints --

    def _save_seconds(self) -> float:
        return self._seconds(self._around.scenario.training.save)

    def _kept(self, version: int) -> SavedShard:
        """The shard as it is now, to be written while updates continue."""
        assert self._plan is not None
        kept: dict[BucketId, SavedBucket] = {}
        if not self._around.scenario.servers:
            return self._kept_by_rank(self._plan, version)
        for bucket in self._plan.buckets_of(self.task.index):
            tag = self._oracle.version(bucket.id, version)
            slot = self._around.memory.slot(self.task, bucket.id, version % self._slot_count)
            slot.expect(tag, f"{self.task}, which saves it,")
            assert tag is not None
            kept[bucket.id] = SavedBucket(tag, self._momentum.get(bucket.id, 0))
        return kept

    def _kept_by_rank(self, plan: Plan, version: int) -> SavedShard:
        """The training thread of a rank has all buckets, and those of no other version."""
        worker = self._around.tasks[self.task].worker
        assert worker is not None
        if worker.step != version:
            raise Violation(Rule.EARLY_COMMIT, f"{self.task} saves version {version} in step {worker.step}")
        found = {bucket.id: self._oracle.version(bucket.id, version) for bucket in plan.buckets}
        return {bucket: SavedBucket(tag, 0) for bucket, tag in found.items() if tag is not None}

    def _write_shard(self, version: int, shard: SavedShard) -> None:
        self._around.disk.shards.setdefault((self._job, version), {})[self.task.index] = shard
        self._around.handle(self.task, ShardSaved(Saved(version, f"shard-{self.task.index}", 1, "")))

    def _write_checkpoint(self, effect: WriteCheckpoint) -> None:
        self._around.disk.complete(self._job, effect.version, dict(effect.states))
        self._around.handle(self.task, CheckpointWritten(effect.version))

    # -- gradients come in --

    def take(self, worker: TaskId, life: Incarnation, step: Step, bucket: BucketId, edition: int, where: Where) -> None:
        """All bytes are here, in ``where``."""
        number = self._note(life, where)
        self._around.handle(self.task, GradientArrived(worker, life, step, bucket, edition, number))

    def _note(self, life: Incarnation, where: Where) -> int:
        self._numbered += 1
        lent = LentCell(life, where, None) if isinstance(where, Cell) else LentCell(life, where.source, where)
        self.arrivals[self._numbered] = lent
        return self._numbered

    # -- the store --

    def _begin_apply(self, effect: Apply) -> None:
        around, oracle = self._around, self._oracle
        arrivals = [self.arrivals[number] for number in effect.arrivals]
        lives = {sender: one.life for sender, one in zip(effect.contributors, arrivals, strict=False)}
        gradients = oracle.gradients_of(effect, lives)
        oracle.check_scale(effect)
        given_by = tuple(gradient.worker for gradient in gradients)
        if effect.contributors != given_by:
            raise Violation(
                Rule.WRONG_GRADIENTS, f"{effect} is made of gradients of the wrong workers; it must be {given_by}"
            )
        if len(effect.arrivals) != len(gradients):
            raise Violation(
                Rule.WRONG_GRADIENTS, f"{effect} is made of {len(effect.arrivals)} gradients, not {len(gradients)}"
            )
        taken = [self.arrivals.pop(number) for number in effect.arrivals]
        source, target = self._slots(effect)
        source.expect(oracle.base_of(effect), f"{self.task} before step {effect.step}")
        for arrival, gradient in zip(taken, gradients, strict=True):
            arrival.cell.expect(gradient, f"{self.task} at the beginning of its update")
            arrival.cell.readers += 1
        tag = oracle.next_tag(effect, gradients, self._next_number(effect, gradients))
        self._refuse_overwriting(effect)
        target.write(0, tag)
        begins, ends = self._store_time(effect)
        around.after(self.task, begins - around.agenda.now, lambda: self._at_work(effect))
        around.after(self.task, ends - around.agenda.now, lambda: self._end_apply(effect, taken, gradients, tag))

    def _begin_measuring(self, effect: Measure) -> None:
        """The gradients are kept; one that is replaced meanwhile gives a norm that nobody takes."""
        tags = [self.arrivals[number].cell.whole() for number in effect.arrivals]
        norm = norm_of(tag for tag in tags if isinstance(tag, GradientTag))
        measured = BucketMeasured(effect.bucket, effect.attempt, norm)
        seconds = self._seconds(self._around.scenario.training.apply)
        self._around.after(self.task, seconds, lambda: self._around.handle(self.task, measured))

    def _next_number(self, effect: Apply, gradients: tuple[GradientTag, ...]) -> int:
        """The next version of this bucket, if the run tracks numbers; this advances the optimizer's state."""
        if self._around.numbers is None:
            return 0
        given = [gradient.number for gradient in gradients]
        base = self._oracle.base_of(effect)
        if base is None:
            return given[0]
        if not self._around.scenario.servers:
            return mixed(base.number, given, effect.replicas)  # every rank has its own optimizer
        momentum = mixed(self._momentum.get(effect.bucket, 0), given, effect.replicas, effect.rates)
        self._momentum[effect.bucket] = momentum
        return mixed(base.number, momentum)

    def _store_time(self, effect: Apply) -> tuple[float, float]:
        """When this update begins and ends: the store makes one after another."""
        training, now = self._around.scenario.training, self._around.agenda.now
        seconds = self._seconds(training.apply)
        if training.store_bandwidth:
            assert self._plan is not None
            moved = (len(effect.contributors) + 2) * self._plan.buckets[effect.bucket].nbytes
            seconds += moved / training.store_bandwidth
        if self.slowed is not None and effect.step >= self.slowed[0]:
            seconds += self.slowed[1]
        begins = max(now, self.store_free_at)
        self.store_free_at = begins + seconds
        self.store_busy += seconds
        return begins, begins + seconds

    def _at_work(self, effect: Apply) -> None:
        self.applying = (effect, self._around.agenda.now)

    def _slots(self, effect: Apply) -> tuple[Cell, Cell]:
        if effect.from_slot == effect.to_slot and not self._around.scenario.overwrites:
            raise Violation(Rule.IN_PLACE, f"step {effect.step} updates bucket {effect.bucket} in place")
        slot = self._around.memory.slot
        return slot(self.task, effect.bucket, effect.from_slot), slot(self.task, effect.bucket, effect.to_slot)

    def _refuse_overwriting(self, effect: Apply) -> None:
        copies = self._copies.get((effect.bucket, effect.to_slot), [])
        reading = [copy for copy in copies if copy.reads]
        if reading:
            raise Violation(
                Rule.OVERWRITTEN,
                f"{self.task} overwrites slot {effect.to_slot} of bucket {effect.bucket} in step {effect.step} "
                f"while version {reading[0].parcel.number} is read from it for {reading[0].route.receiver}",
            )
        copies.clear()

    def _end_apply(
        self, effect: Apply, taken: list[LentCell], gradients: tuple[GradientTag, ...], tag: VersionTag
    ) -> None:
        self.applying = None
        source, target = self._slots(effect)
        if source is not target:
            source.expect(self._oracle.base_of(effect), f"{self.task} after step {effect.step}")
        for arrival, gradient in zip(taken, gradients, strict=True):
            arrival.cell.expect(gradient, f"{self.task} at the end of its update")
            arrival.cell.readers -= 1
            arrival.release()
        target.write(1, tag)
        self._oracle.made(tag)
        self._around.handle(self.task, BucketApplied(effect.bucket, effect.step))

    # -- parameters go out --

    def _send_version(self, effect: SendVersion) -> None:
        around = self._around
        assert self._plan is not None
        if effect.peer == self.task:
            self._lend_to_itself(effect)
            return
        route = around.route(self.task, effect.peer, effect.ticket)
        if route is None:
            return
        arrived = VersionArrived(self.task, effect.version, effect.bucket)
        copy = Copy(
            around.network,
            route,
            Parcel(TensorKind.VERSION, effect.version, effect.bucket, self._plan.buckets[effect.bucket].nbytes),
            around.memory.slot(self.task, effect.bucket, effect.slot),
            around.memory.parameters(effect.peer, effect.bucket),
            self._lanes,
            lambda: around.handle(effect.peer, arrived),
        )
        self._copies.setdefault((effect.bucket, effect.slot), []).append(copy)
        copy.start()
        route.link.break_by_chance(route.way)

    def _lend_to_itself(self, effect: SendVersion) -> None:
        """The worker in the same task reads the slot in place."""
        around, me = self._around, self.task
        ended = TransferEnded(me, effect.version, effect.bucket, TensorKind.VERSION, ok=True)
        slot = around.memory.slot(me, effect.bucket, effect.slot)
        number = self._note(around.incarnations[me], OwnLoan(slot, lambda: around.soon(me, ended)))
        around.soon(me, VersionArrived(me, effect.version, effect.bucket, number))
