"""The machine of a server whose shards have second homes: a version is known only when the second home has it too.

What a bucket's next version is made of goes to its second home while it is made here, and a third state follows::

    HANDED_ON   made here; the second home has not said that it has it

A server holds buckets of its own, and, as a second home, those of another server. When that server is lost, the next
view makes them its own: at the version that it has made of what was handed on. Workers send again what is open.

If a program loads a state into the optimizers, the bucket is copied to its second home once more, and the program hears
that it is loaded when that one has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import (
    Apply,
    Effect,
    GiveBack,
    GrantRegion,
    Prepare,
    Send,
)
from lockstep.protocol.core.events import (
    BucketApplied,
    BucketTaken,
    Event,
    LinkLost,
    LinkUp,
    MeanArrived,
    MeanMade,
    Prepared,
    Received,
    Served,
    ShardSaved,
    TensorKind,
    Tick,
    TransferEnded,
)
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, NOTHING_TO_APPLY, BucketId, ClusterShape, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import (
    Applied,
    BucketCopy,
    Commit,
    Grant,
    HandOn,
    Holding,
    Layout,
    Message,
    Open,
    PartialNorm,
    Question,
    Rates,
    Seal,
    View,
)
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.waits import Wait
from lockstep.protocol.server.answering import Answering
from lockstep.protocol.server.handing_on import HandingOn
from lockstep.protocol.server.ledger import Ledger, ServedBucketState, ServedBucketTrigger, WorkerSide
from lockstep.protocol.server.second_homes import NOTHING, HeldUpdate, OtherServers, Places, SecondBucket
from lockstep.protocol.server.second_shard import SecondShard
from lockstep.protocol.server.server_machine import ServerMachine


class HomedServerMachine(ServerMachine):
    """One server's own buckets, and those that it is the second home of."""

    def __init__(
        self, task: TaskId, shape: ClusterShape, journal: Journal, *, eager: bool, summed: bool, any_rates: bool
    ) -> None:
        super().__init__(task, shape, journal, eager=eager, summed=summed, any_rates=any_rates)
        self.places = Places(Placement.at_start(shape.servers))
        self.steps_made: dict[BucketId, int] = {}
        """How often a version of each bucket was made here, as its home."""
        self.made_twice = 0
        """How many of them had been made here before, in either role. Never any; counted so that it can be seen."""
        self._newest_made: dict[BucketId, Step] = {}
        self._others = OtherServers([other for other in shape.server_ids() if other != task], self.places)
        self._handing_on = HandingOn(task, self.places, self._others, self._ledgers)
        self._seconds = SecondShard(self.places, journal, self._others.reaches)
        self._later_view: View | None = None
        """One that is taken once all is made that this server holds of buckets whose home it becomes."""
        self._former_saves = 0
        """How many shards are being written that no longer are what this server is the home of."""
        self._answering = Answering()

    def held(self, bucket: BucketId) -> Sequence[HeldUpdate]:
        """What the next versions of a bucket are made of that this server is the second home of."""
        second = self._seconds.buckets.get(bucket)
        return () if second is None else tuple(second.held)

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case MeanMade():
                return self._handing_on.on_mean_made(event, now)
            case MeanArrived():
                return self._seconds.on_mean(event, now)
            case TransferEnded(kind=TensorKind.MEAN):
                return self._on_mean_left(event, now)
            case BucketApplied() if event.bucket in self._seconds.buckets:
                self._count(event.bucket, event.step)
                return self._seconds.on_made(event, now) + self._take_view_that_waited(now)
            case BucketTaken():
                return self._seconds.on_taken(event, now) + self._take_view_that_waited(now)
            case Served():
                return self._on_served(event)
            case Received(message=View() as view):
                return self._on_view(view, now)
            case Received(peer=peer) if peer in self._others.by_task:
                return self._on_server_said(event, now) + super().handle(event, now)
            case LinkUp(peer=peer) if peer in self._others.by_task:
                return self._on_server_up(event, now) + super().handle(event, now)
            case LinkLost(peer=peer) if peer in self._others.by_task:
                self._others.on_link_lost(peer)
                self._handing_on.on_link_lost(peer)
                return super().handle(event, now)
            case Tick():
                return self._handing_on.hand_on_again_if_due(now) + super().handle(event, now)
            case _:
                return super().handle(event, now)

    def _on_server_said(self, event: Received, now: float) -> list[Effect]:
        other = self._others.by_task[event.peer]
        if event.incarnation != other.incarnation:
            return []
        match event.message:
            case Grant(ticket=ticket):
                other.grant = ticket
                return self._handing_on.hand_on_all(event.peer, now) + self._handing_on.copy_next()
            case HandOn() as update:
                return self._seconds.on_handed_on(event.peer, update, now)
            case Holding() as said:
                return self._on_holding(event.peer, said, now)
            case BucketCopy() as part:
                return self._seconds.on_copy(event.peer, part)
            case _:
                return []

    def _on_server_up(self, event: LinkUp, now: float) -> list[Effect]:
        self._others.on_link_up(event.peer, event.incarnation)
        self._journal.record(now, Happening.LINK_UP, peer=event.peer)
        said = self._seconds.on_home_up(event.peer)
        return [*said, GrantRegion(event.peer)] if self._prepared else []

    # -- the view --

    def _on_layout(self, side: WorkerSide, layout: Layout, now: float) -> list[Effect]:
        """What it prepares depends on the view. A server that joins a job that runs does not begin with a checkpoint:
        it is filled by others."""
        if not self.places.view:
            side.layout = layout
            return []
        effects = super()._on_layout(side, layout, now)
        fresh = replace(layout, start=INITIAL_STEP, checkpoint="")
        late = self.places.view > 1 and not any(h.home == self.task.index for h in self.places.placement.shards)
        return [Prepare(fresh) if isinstance(one, Prepare) and late else one for one in effects]

    def _on_prepared(self, event: Prepared, now: float) -> list[Effect]:
        if self._prepared:
            return []
        self.places.plan = event.plan
        effects = super()._on_prepared(event, now)
        effects += self._take_places(now)
        return effects + [GrantRegion(peer) for peer in self._others.linked]

    def _own_buckets(self, plan: Plan) -> tuple[BucketId, ...]:
        return tuple(bucket.id for bucket in plan.buckets if self.places.of(bucket.id).home == self.task.index)

    def _on_view(self, view: View, now: float) -> list[Effect]:
        if self._has_to_make_before(view):
            self._later_view = view
            return []
        self._later_view = None
        if not self.places.take(view):
            return []
        self.coordinator = self.places.placement.coordinator
        self._coordinator = self.places.lives[self.coordinator]
        self.committed = max(self.committed, view.start - 1)
        if self._prepared:
            return self._take_places(now)
        chief = self._workers[CHIEF]
        if self._layout is not None or chief.layout is None:
            return []
        return self._on_layout(chief, chief.layout, now)

    def _has_to_make_before(self, view: View) -> bool:
        """What it holds of a bucket that it is the home of from now on, it makes first: workers may have that version,
        and its step may be committed. Meanwhile nothing can happen that is not repeated after that."""
        if not self._prepared or view.number <= self.places.view or not view.shards:
            return False
        assert self.places.plan is not None
        shards = self.places.plan.buckets
        busy = [bucket for bucket, here in self._seconds.buckets.items() if here.is_busy]
        return any(view.shards[shards[bucket].server].home == self.task.index for bucket in busy)

    def _take_view_that_waited(self, now: float) -> list[Effect]:
        return [] if self._later_view is None else self._on_view(self._later_view, now)

    def _take_places(self, now: float) -> list[Effect]:
        """Be what the view says of each bucket; all that is open is said again."""
        assert self.places.plan is not None
        me, before = self.task.index, frozenset(self._ledgers)
        effects: list[Effect] = []
        for bucket in self.places.plan.buckets:
            homes = self.places.of(bucket.id)
            if homes.home == me:
                effects += self._be_home(bucket.id)
            elif homes.second == me:
                self._seconds.buckets.setdefault(
                    bucket.id, SecondBucket(self._first_version if homes.whole else NOTHING)
                )
            else:
                self._ledgers.pop(bucket.id, None)
                self._seconds.buckets.pop(bucket.id, None)
        if before != self._ledgers.keys():
            self._save_anew()
        self._find_step(now)
        if before != self._ledgers.keys():
            effects += self._take_in_seals(now)
        for ledger in self._ledgers.values():
            self._handing_on.hand_to_second(ledger.bucket)
            effects += self._make_known_if_held(ledger, now)
            effects += self._apply_if_possible(ledger, now)  # the view may tell of a commit that was lost
        effects += self._handing_on.copy_next()
        for other in self._others.by_task:
            effects += self._handing_on.hand_on_all(other, now)
        effects += self._say_again_to_workers(now) + self._say_what_is_unheard(now)
        return effects + self._answer_what_can_be() + self._seconds.take_early_copies()

    def _take_in_seals(self, now: float) -> list[Effect]:
        """What workers have sealed of this step holds for the buckets that are new here, too."""
        effects: list[Effect] = []
        self._norm.forget()
        for side in self._workers.values():
            if side.seal is None or side.seal.step != self.step:
                continue
            self._note_clip(side.seal, now)
            for ledger in self._ledgers.values():
                if ledger.version == self.step and not ledger.is_closed:
                    effects += self._gradients.keep_only_sealed(ledger, side)
        return effects + self._measure_if_asked(now)

    def _save_anew(self) -> None:
        """What was saved of a version, or is being written, is of other buckets than those that are here now."""
        if self._save_version > INITIAL_STEP and (self._saved is None or self._saved.version != self._save_version):
            self._former_saves += 1
        self._saved, self._save_version = None, INITIAL_STEP

    def _on_shard_saved(self, event: ShardSaved) -> list[Effect]:
        if self._former_saves:
            self._former_saves -= 1  # they are written one after another
            return []
        return super()._on_shard_saved(event)

    def _say_saved(self) -> list[Effect]:
        """In which view: there may be a newer one, in which other buckets are this server's."""
        return [] if self._saved is None else [Send(self.coordinator, replace(self._saved, view=self.places.view))]

    @property
    def _first_version(self) -> int:
        assert self._layout is not None
        return self._layout.start

    def _be_home(self, bucket: BucketId) -> list[Effect]:
        self._handing_on.be_home(bucket)
        known = self._seconds.buckets.pop(bucket, None)
        if bucket in self._ledgers:
            return []
        if known is None:
            self._ledgers[bucket] = Ledger(bucket, [0] * self.slots, self._first_version)
            return []
        self._ledgers[bucket] = Ledger(bucket, [0] * self.slots, known.version)
        return [GiveBack(known.arrival)] if known.arrival else []

    def _find_step(self, now: float) -> None:
        """The step that the buckets of this server are in: with new ones it may be the one before."""
        if not self._ledgers:
            return
        self.step = min(ledger.version for ledger in self._ledgers.values())
        self._applied, self._applied_at = self.step - 1, now if self.committed < self.step - 1 else None

    def _say_again_to_workers(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for side in self._workers.values():
            if side.granted and self.contributing.includes(side.id, self.step):
                effects.append(self._open(side, now))
            for bucket in sorted(self._ledgers, reverse=True):
                effects += self._deliver(side, self._ledgers[bucket], now)
        return effects

    def _deliver(self, side: WorkerSide, ledger: Ledger, now: float) -> list[Effect]:
        """Only to a worker that knows this view. One that does not refuses what comes from a server that is not the
        bucket's home as far as it knows, and what has left is sent again much later; it asks again with the view."""
        if side.pull is not None and side.pull.view < self.places.view:
            return []
        return super()._deliver(side, ledger, now)

    def _open(self, side: WorkerSide, now: float) -> Send:
        said = super()._open(side, now).message
        assert isinstance(said, Open)
        return Send(side.id, replace(said, view=self.places.view))

    def _unheard(self) -> list[Message]:
        view, unheard = self.places.view, super()._unheard()
        if self._applied == NOTHING_TO_APPLY and not any(isinstance(one, Applied) for one in unheard):
            # Every view counts anew, and nothing that happens here shows whether the coordinator has heard it.
            unheard.append(Applied(self._applied))
        return [replace(one, view=view) if isinstance(one, Applied) else one for one in unheard]

    def _forget_step(self, step: Step) -> None:
        """Rates are kept for a step longer: in it, this server may become the home of other buckets."""
        super()._forget_step(step - 1)

    # -- what a server without buckets of its own hears: it may become the home of some --

    def _on_seal(self, side: WorkerSide, seal: Seal, now: float) -> list[Effect]:
        if self._ledgers:
            return super()._on_seal(side, seal, now)
        known = side.seal
        if known is None or (known.step, known.order) < (seal.step, seal.order):
            side.seal = seal
            return self._compare_loops(side, seal)
        return []

    def _on_rates(self, side: WorkerSide, rates: Rates, now: float) -> list[Effect]:
        if self._ledgers or side.id != CHIEF or rates.step in self._rates:
            return super()._on_rates(side, rates, now)
        for old in [step for step in self._rates if INITIAL_STEP < step < rates.step - 1]:
            del self._rates[old]
        self._rates[rates.step] = rates.groups
        return []

    @property
    def _compares_loops(self) -> bool:
        """Every server does, since any may come to speak for all."""
        return True

    @property
    def _speaks_for_all(self) -> bool:
        return self.task == self.coordinator

    def _partial_norm(self) -> PartialNorm | None:
        plan = self.places.plan
        return None if plan is None else self._norm.partial_by_shard(self.places.view, lambda b: plan.buckets[b].server)

    # -- at its home --

    def _may_apply(self, ledger: Ledger) -> bool:
        return super()._may_apply(ledger) and self._handing_on.may_make_next(ledger.bucket)

    def _apply_if_possible(self, ledger: Ledger, now: float) -> list[Effect]:
        return [self._noted(one) if isinstance(one, Apply) else one for one in super()._apply_if_possible(ledger, now)]

    def _noted(self, apply: Apply) -> Apply:
        self.steps_made[apply.bucket] = self.steps_made.get(apply.bucket, 0) + 1
        self._count(apply.bucket, apply.step)
        return self._handing_on.begin(apply)

    def _count(self, bucket: BucketId, step: Step) -> None:
        """This server begins to make the version after ``step``."""
        self.made_twice += step <= self._newest_made.get(bucket, NOTHING)
        self._newest_made[bucket] = step

    def _on_mean_left(self, event: TransferEnded, now: float) -> list[Effect]:
        ledger = self._ledgers.get(event.bucket)
        if ledger is None or event.peer != self.places.of(event.bucket).second_task:
            return []
        self._handing_on.on_mean_left(event)
        return self._apply_if_possible(ledger, now)

    def _on_bucket_applied(self, event: BucketApplied, now: float) -> list[Effect]:
        ledger = self._ledgers.get(event.bucket)
        if ledger is None:
            return []
        ledger.go(ServedBucketTrigger.HAND_ON)
        return self._handing_on.on_made(event, now) + self._make_known_if_held(ledger, now)

    def _on_holding(self, peer: TaskId, said: Holding, now: float) -> list[Effect]:
        ledger = self._ledgers.get(said.bucket)
        if ledger is None or self.places.of(said.bucket).second_task != peer:
            return []
        if self._handing_on.on_holding(ledger, said):
            effects = self._handing_on.copy_next() + self._say_if_whole() + self._answer_what_can_be()
        else:
            effects = self._make_known_if_held(ledger, now)
        return effects + self._apply_if_possible(ledger, now)

    def _make_known_if_held(self, ledger: Ledger, now: float) -> list[Effect]:
        if ledger.state is not ServedBucketState.HANDED_ON:
            return []
        differing = self._handing_on.differing(ledger.bucket)
        if differing is not None:
            text = phrases.homes_differ(self.task, differing, ledger.version)
            reason = Reason(Cause.HOMES_DIFFER, text, peer=str(self.task))
            return self._break(differing, reason, now)
        if not self._handing_on.is_held(ledger):
            return []
        self._handing_on.on_known(ledger.bucket)
        return self._make_known(ledger, ServedBucketTrigger.HELD, now) + self._handing_on.copy_next()

    def _on_commit(self, event: Received, commit: Commit, now: float) -> list[Effect]:
        return super()._on_commit(event, commit, now) + self._say_if_whole()

    def _say_if_whole(self) -> list[Effect]:
        return self._handing_on.say_if_whole(self.coordinator, self.committed)

    # -- questions of workers, outside of the steps --

    def _on_question(self, side: WorkerSide, question: Question) -> list[Effect]:
        return self._answering.ask(side.id, question) + self._answer_what_can_be()

    def _forget_life(self, side: WorkerSide) -> list[Effect]:
        self._answering.forget(side.id)
        return super()._forget_life(side)

    def _on_served(self, event: Served) -> list[Effect]:
        """The store has another state of a bucket: its second home gets it."""
        bucket = event.question.bucket
        if event.answer.problem or bucket not in self._ledgers:
            return [Send(event.peer, event.answer)]
        self._handing_on.has_changed(bucket)
        self._answering.has_changed(event.peer, bucket, event.answer)
        return self._handing_on.copy_next() + self._answer_what_can_be()

    def _answer_what_can_be(self) -> list[Effect]:
        return self._answering.what_can_be(self.places.view, self.buckets, self._handing_on.lags)

    # -- time, and what others may ask --

    def next_deadline(self) -> float | None:
        due = [at for at in (super().next_deadline(), self._handing_on.repeat_at) if at is not None]
        return min(due, default=None)

    def waits(self) -> list[Wait]:
        return super().waits() + self._handing_on.waits(self.step)

    def snapshot(self) -> dict[str, object]:
        placement = self.places.placement
        return {
            **super().snapshot(),
            "view": self.places.view,
            "whole": placement.whole,
            "made": sum(self.steps_made.values()),
            "made_twice": self.made_twice,
            "second_home_of": sorted(self._seconds.buckets),
        }
