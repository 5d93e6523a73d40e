"""The machine of one server: it counts gradients by sender and decides when a bucket may advance.

Each bucket of the shard is at a version *v* and collects the gradients of step *v*::

    COLLECTING  not every contributor's gradient is here
    COMPLETE    all are here; applying waits for the rates, the seals, the norm (``measuring.py``), the commit of the
                step before, or for a reader of the slot that the next version will overwrite
    APPLYING    the store reduces and updates, out of place unless it ``overwrites``

and back to COLLECTING at version *v+1*. The store has two slots per bucket: version *v* stays readable in one while
*v+1* is written to the other, until step *v* is committed; a worker that died in the middle of a step can compute it
again. Where nobody can come back, and all workers have sealed a step before any bucket of it is applied, version *v* is
needed by nobody any more: the store then has one slot, and *v+1* is written over *v* (``overwrites``), which spares
memory and a pass over it.

Versions start at -1: the chief's initial parameters travel as its gradient of step -1.
"""

from __future__ import annotations

from collections.abc import Collection

from lockstep.protocol.core.effects import Apply, Effect, GiveBack, GrantRegion, Prepare, Send, Serve
from lockstep.protocol.core.events import (
    BucketApplied,
    BucketMeasured,
    Event,
    GradientArrived,
    LinkLost,
    LinkUp,
    Prepared,
    Received,
    ShardSaved,
    TensorKind,
    Tick,
    TransferEnded,
)
from lockstep.protocol.core.ids import (
    CHIEF,
    INITIAL_STEP,
    NOTHING_TO_APPLY,
    BucketId,
    ClusterShape,
    Incarnation,
    Step,
    TaskId,
    worker,
)
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import (
    Commit,
    Contributors,
    Done,
    GroupRates,
    Layout,
    Open,
    Pull,
    Question,
    Rates,
    Seal,
    TotalNorm,
)
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.server.admission import why_not_admitted, why_not_counted
from lockstep.protocol.server.gradients import CollectedGradients
from lockstep.protocol.server.ledger import NO_GRADIENT, Ledger, ServedBucketState, ServedBucketTrigger, WorkerSide
from lockstep.protocol.server.measuring import MeasuringShard
from lockstep.protocol.server.seals import limit_of, without_gradient


class ServerMachine(MeasuringShard):
    """One server's shard in synchronous training."""

    def __init__(
        self,
        task: TaskId,
        shape: ClusterShape,
        journal: Journal,
        *,
        eager: bool,
        summed: bool = False,
        aggregate: int | None = None,
        any_rates: bool = False,
        averages: bool = False,
        overwrites: bool = False,
    ) -> None:
        """``summed``: gradients are added up, not averaged. ``aggregate``: how many workers make a step, if not all.
        ``any_rates``: the rates of a step may come from any worker, since the chief may be away. ``averages``: a
        version is the mean of the gradients itself, so no step needs rates (without servers: the workers' own
        optimizers use the mean). ``overwrites``: no version is kept once all workers have sealed their step with it.
        """
        assert not (overwrites and (eager or aggregate is not None)), "a worker may still read what is overwritten"
        super().__init__(task, shape, journal, aggregate)
        self._overwrites = overwrites
        self._any_rates = any_rates or aggregate is not None
        self.eager = eager
        self.summed = summed
        self.averages = averages
        self._layout: Layout | None = None
        self._prepared = False
        self._rates: dict[Step, tuple[GroupRates, ...]] = {INITIAL_STEP: ()}
        self._coordinator: Incarnation = 0
        self._gradients = CollectedGradients(self._norm, lambda: self.step)

    @property
    def slots(self) -> int:
        return 1 if self._overwrites else super().slots

    @property
    def buckets(self) -> Collection[BucketId]:
        """What this server is the home of."""
        return self._ledgers.keys()

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case GradientArrived():
                return self._on_gradient_arrived(event, now)
            case TransferEnded(kind=TensorKind.VERSION):
                return self._on_transfer_ended(event, now)
            case BucketApplied():
                return self._on_bucket_applied(event, now)
            case BucketMeasured():
                return self._on_bucket_measured(event, now)
            case Received():
                return self._on_received(event, now)
            case LinkUp():
                return self._on_link_up(event, now)
            case LinkLost():
                return self._on_link_lost(event, now)
            case Prepared(layout=None):
                return self._on_prepared(event, now)
            case ShardSaved():
                return self._on_shard_saved(event)
            case Tick():
                return self._on_tick(now)
            case _:
                return []

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        message = event.message
        if isinstance(message, Commit):
            return self._on_commit(event, message, now)
        if isinstance(message, Contributors):
            return self._on_contributors(event, message, now)
        if isinstance(message, TotalNorm):
            return self._on_total_norm(event, message, now)
        side = self._workers.get(event.peer)
        if side is None or event.incarnation != side.incarnation:
            return []
        match message:
            case Pull():
                return self._on_pull(side, message, now)
            case Rates():
                return self._on_rates(side, message, now)
            case Seal():
                return self._on_seal(side, message, now)
            case Layout():
                return self._on_layout(side, message, now)
            case Done():
                return self._on_done(side, message, now)
            case Question():
                return self._on_question(side, message)
            case _:
                return []

    def _on_question(self, side: WorkerSide, question: Question) -> list[Effect]:
        return [Serve(side.id, question)]

    # -- getting ready --

    def _on_link_up(self, event: LinkUp, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if event.peer == self.coordinator:
            self._coordinator = event.incarnation
            effects += self._say_what_is_unheard(now)
        side = self._workers.get(event.peer)
        if side is None:
            return effects
        if side.incarnation not in (0, event.incarnation):
            effects += self._forget_life(side)
        side.linked, side.incarnation, side.since = True, event.incarnation, now
        self._journal.record(now, Happening.LINK_UP, peer=event.peer)
        return effects

    def _forget_life(self, side: WorkerSide) -> list[Effect]:
        """Another incarnation of this worker. What the former one delivered stays where nothing is edited afterwards:
        the same step, computed again, has the same gradients. Otherwise its seal is missing, and it must deliver again.
        """
        side.layout, side.granted, side.seal, side.done = None, False, None, None
        if self.eager:
            return []
        return [effect for ledger in self._ledgers.values() for effect in self._gradients.take_out(ledger, side.id)]

    def _on_link_lost(self, event: LinkLost, now: float) -> list[Effect]:
        side = self._workers.get(event.peer)
        if side is None or not side.linked:
            return []
        freed = self._lose_link(side, event, now)
        return [effect for ledger in freed for effect in self._apply_if_possible(ledger, now)]

    def _on_layout(self, side: WorkerSide, layout: Layout, now: float) -> list[Effect]:
        side.layout = layout
        if side.id == CHIEF and self._layout is None:
            self._layout = layout
            return [Prepare(layout)]
        return self._admit(side, now) if self._prepared else []

    def _on_prepared(self, event: Prepared, now: float) -> list[Effect]:
        if self._prepared:
            return []
        assert self._layout is not None
        self._prepared = True
        start = self._layout.start
        for bucket in self._own_buckets(event.plan):
            self._ledgers[bucket] = Ledger(bucket, [0] * self.slots, start)
        if start > INITIAL_STEP:
            # The shard comes from a checkpoint: every task knows what happened before.
            self.step, self.committed, self._applied = start, start - 1, start - 1
        effects: list[Effect] = []
        for side in self._workers.values():
            side.since = side.since or now  # one that has not come yet is awaited from now on
            if side.layout is not None and side.linked:
                effects += self._admit(side, now)
        if not self._ledgers:
            # More servers than buckets: this one holds nothing, and must not delay any task.
            self._applied = NOTHING_TO_APPLY
            effects += self._say_what_is_unheard(now)
        return effects

    def _own_buckets(self, plan: Plan) -> tuple[BucketId, ...]:
        return tuple(bucket.id for bucket in plan.buckets_of(self.task.index))

    def _admit(self, side: WorkerSide, now: float) -> list[Effect]:
        """This worker's model matches the chief's: give it memory and send it the open step."""
        assert self._layout is not None
        refusal = why_not_admitted(side, self._layout)
        if refusal is not None:
            return self._break(side.id, refusal, now)
        side.granted = True
        effects: list[Effect] = [GrantRegion(side.id)]
        if self.contributing.includes(side.id, self.step):
            effects.append(self._open(side, now))
        return effects

    def _open(self, side: WorkerSide, now: float) -> Send:
        step = self._expected_step(side)
        side.repeat_at = now + REPEAT_SECONDS
        self._journal.record(now, Happening.OPENED, step, peer=side.id)
        return Send(side.id, Open(step, self._have(side)))

    def _have(self, side: WorkerSide) -> tuple[BucketId, ...]:
        return tuple(
            b for b, ledger in self._ledgers.items() if ledger.version > self.step or side.id in ledger.arrived
        )

    # -- gradients come in --

    def _on_gradient_arrived(self, event: GradientArrived, now: float) -> list[Effect]:
        ledger = self._ledgers.get(event.bucket)
        refusal = self._why_refused(event, ledger)
        if ledger is None or refusal is not None:
            self._drop(event.peer, event.step, event.bucket, refusal or "not a bucket of this server", now)
            return [GiveBack(event.arrival)]
        effects = self._gradients.add(ledger, event)
        self._workers[event.peer].since = now
        self._journal.record(now, Happening.ARRIVED, event.step, event.bucket, event.peer)
        effects += self._measure_if_asked(now) + self._measure_ahead(ledger)
        return effects + self._apply_if_possible(ledger, now)

    def _why_refused(self, event: GradientArrived, ledger: Ledger | None) -> str | None:
        side = self._workers.get(event.peer)
        if ledger is None or side is None:
            return "not a bucket of this server, or not a worker"
        return why_not_counted(event, ledger, side, self.contributing)

    def _on_seal(self, side: WorkerSide, seal: Seal, now: float) -> list[Effect]:
        known = side.seal
        if seal.step != self.step or (known is not None and known.step == seal.step and known.order >= seal.order):
            return []
        side.seal = seal
        self._journal.record(now, Happening.SEALED, seal.step, peer=side.id)
        self._note_clip(seal, now)
        refusal = self._seals.why_not_with(side, seal)
        effects = [] if refusal is None else self._break(side.id, refusal, now)
        effects += self._compare_loops(side, seal)
        if not self.contributing.includes(side.id, seal.step):
            return effects
        for ledger in self._ledgers.values():
            if ledger.version == seal.step and not ledger.is_closed:
                effects += self._gradients.keep_only_sealed(ledger, side)
        return effects + self._measure_if_asked(now) + self._apply_all_possible(now)

    def _on_rates(self, side: WorkerSide, rates: Rates, now: float) -> list[Effect]:
        # A server without a bucket applies nothing, and would keep the rates of every step forever.
        if side.id != CHIEF and not self._any_rates:
            return []
        if not self._ledgers or rates.step < self.step or rates.step in self._rates:
            return []
        self._rates[rates.step] = rates.groups
        return self._apply_all_possible(now)

    # -- a bucket advances --

    def _apply_all_possible(self, now: float) -> list[Effect]:
        return [effect for ledger in self._ledgers.values() for effect in self._apply_if_possible(ledger, now)]

    def _apply_if_possible(self, ledger: Ledger, now: float) -> list[Effect]:
        if ledger.is_closed:
            return []
        step = ledger.version
        if not self.contributing.is_known(step):
            return []
        members = self.contributing.of(step)
        if ledger.state is ServedBucketState.COLLECTING:
            if len(ledger.arrived) < len(members) or not all(m in ledger.arrived for m in members):
                return []
            ledger.go(ServedBucketTrigger.COMPLETE)
        if ledger.state is not ServedBucketState.COMPLETE or not self._may_apply(ledger):
            return []
        ledger.go(ServedBucketTrigger.APPLY)
        self._journal.record(now, Happening.CONSUMED, step, ledger.bucket)
        giving = tuple(m for m in members if ledger.arrived[m] is not NO_GRADIENT)
        arrivals = tuple(ledger.arrived[m].number for m in giving)
        slots = (ledger.slot_of(step), ledger.slot_of(step + 1))
        rates = self._rates.get(step, ())
        seals = self._seals_of(members, step)
        if any(seal.void for seal in seals):
            nothing = Apply(step, ledger.bucket, (), (), 1, rates, *slots)
            return [*(GiveBack(number) for number in arrivals), nothing]
        # Where buckets are applied before the seals, the other workers have sealed a step of values without a gradient:
        # their seals are here, or the bucket would not be complete.
        values = any(seal.values for seal in self._seals.of(members, step))
        replicas = 1 if self.summed or values else len(members)
        without = without_gradient(seals, ledger.bucket)
        scale = self._scale(seals, step)
        limit = limit_of(seals)
        return [Apply(step, ledger.bucket, giving, arrivals, replicas, rates, *slots, without, values, scale, limit)]

    def _seals_of(self, members: tuple[TaskId, ...], step: Step) -> list[Seal]:
        """What all contributors have sealed; nothing where buckets are applied before the seals."""
        return [] if self.eager or step == INITIAL_STEP else self._seals.of(members, step)

    # -- who contributes, where not all workers do --

    def _on_contributors(self, event: Received, message: Contributors, now: float) -> list[Effect]:
        ours = (self.coordinator, self._coordinator)
        if (event.peer, event.incarnation) != ours or message.step < self.step:
            return []
        members = tuple(worker(index) for index in message.workers)
        if not self.contributing.decide(message.step, members):
            return []
        effects: list[Effect] = []
        for ledger in self._ledgers.values():
            if ledger.version != message.step:
                continue
            for sender in [task for task in ledger.arrived if task not in members]:
                effects += self._gradients.remove(ledger, sender)
                self._drop(sender, message.step, ledger.bucket, "does not contribute to this step", now)
        return effects + self._apply_all_possible(now)

    def _may_apply(self, ledger: Ledger) -> bool:
        step = ledger.version
        if step == INITIAL_STEP:
            return True
        return (
            (self.averages or step in self._rates)
            and self.committed >= step - 1
            and ledger.readers[ledger.slot_of(step + 1)] == 0
            and (self.eager or self._sealed(ledger))
        )

    def _sealed(self, ledger: Ledger) -> bool:
        """Every contributor has sealed the step, and what it sealed is what is here."""
        step = ledger.version
        asking = any(seal.asks for seal in self._seals.of_all(step))
        return not asking and self._seals.are_met(ledger) and self._scale_is_known(step)

    def _on_bucket_applied(self, event: BucketApplied, now: float) -> list[Effect]:
        return self._make_known(self._ledgers[event.bucket], ServedBucketTrigger.APPLIED, now)

    def _make_known(self, ledger: Ledger, trigger: ServedBucketTrigger, now: float) -> list[Effect]:
        """The next version of a bucket may be had by everybody."""
        ledger.go(trigger)
        ledger.version += 1
        ledger.arrived.clear()
        self._journal.record(now, Happening.PRODUCED, ledger.version, ledger.bucket)
        effects: list[Effect] = []
        for side in self._workers.values():
            effects += self._deliver(side, ledger, now)
        return effects + self._move_on_if_whole(now)

    def _move_on_if_whole(self, now: float) -> list[Effect]:
        if any(ledger.version <= self.step for ledger in self._ledgers.values()):
            return []
        self._applied, self._applied_at = self.step, now
        self._forget_step(self.step)
        self.step += 1
        effects = self._say_what_is_unheard(now)
        for side in self._workers.values():
            side.since = now
            if side.granted:
                effects.append(self._open(side, now))
        return effects

    def _forget_step(self, step: Step) -> None:
        """This step is made, and nothing that was said of it is needed any more."""
        self._rates.pop(step, None)
        self.contributing.forget(step)

    def _on_transfer_ended(self, event: TransferEnded, now: float) -> list[Effect]:
        ledger = self._transfer_over(event, now)
        return [] if ledger is None else self._apply_if_possible(ledger, now)

    # -- the coordinator --

    def _on_total_norm(self, event: Received, total: TotalNorm, now: float) -> list[Effect]:
        ours = (self.coordinator, self._coordinator)
        if (event.peer, event.incarnation) != ours or not self._norm.decide(total):
            return []
        self._journal.record(now, Happening.MEASURED, total.step, peer=event.peer)
        return self._apply_all_possible(now)

    def _on_commit(self, event: Received, commit: Commit, now: float) -> list[Effect]:
        ours = (self.coordinator, self._coordinator)
        if (event.peer, event.incarnation) != ours:
            return []
        # Before anything is applied to the version that is to be saved, or reduced over the wrong workers.
        effects = self._save(commit.step + 1) if commit.save else []
        if commit.change > self.contributing.change:
            effects += self._change_contributors(commit, now)
        if commit.step <= self.committed:
            return effects
        self.committed = commit.step
        self._journal.record(now, Happening.COMMITTED, commit.step)
        if self.committed >= self.step - 1:
            self._applied_at = None
        return effects + self._apply_all_possible(now)

    def _change_contributors(self, commit: Commit, now: float) -> list[Effect]:
        """The job continues without a lost worker, or takes one back. What was applied stays applied."""
        before = self.contributing.usual
        usual = tuple(worker(index) for index in commit.workers) or self.shape.worker_ids()
        self.contributing.change, self.contributing.usual = commit.change, usual
        effects: list[Effect] = []
        for ledger in self._ledgers.values():
            for gone in set(before) - set(usual):
                effects += self._gradients.take_out(ledger, gone)
            if not all(w in ledger.arrived for w in usual):
                ledger.reopen()
        for side in self._workers.values():
            if side.granted and side.id in usual and side.id not in before:
                effects.append(self._open(side, now))
        self._norm.forget()
        return effects + self._measure_if_asked(now) + self._apply_all_possible(now)

    # -- time --

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._repeat_at is not None and now >= self._repeat_at:
            effects += self._say_what_is_unheard(now)
        for side in self._workers.values():
            if not side.granted or now < side.repeat_at:
                continue
            side.repeat_at = now + REPEAT_SECONDS
            if self._owed_buckets(side):
                self._journal.record(now, Happening.REPEATED, self._expected_step(side), peer=side.id)
                effects.append(self._open(side, now))
        return effects + self._out_of_step(now)

    def next_deadline(self) -> float | None:
        # This is asked after every event, so whether anything is owed is checked only when the time has come.
        due = [side.repeat_at for side in self._workers.values() if side.granted]
        if self._repeat_at is not None:
            due.append(self._repeat_at)
        return min(due, default=None)

    def check(self) -> None:
        super().check()
        for ledger in self._ledgers.values():
            assert ledger.version - self.step in (0, 1), (
                f"bucket {ledger.bucket} is at {ledger.version}, step {self.step}"
            )
        if self._ledgers:
            assert self.committed < self.step, "a step was committed before this shard finished it"
            assert not self._unheard() or self._repeat_at is not None, "what the coordinator must know is not repeated"
