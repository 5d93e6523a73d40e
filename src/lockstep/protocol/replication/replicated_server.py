"""One server of a job with second homes: the home of some shards, the second home of others, perhaps the coordinator.

A message counts only in the view in which it was said (``replica_messages.py``). A server goes on without another one
only with proof of its end: ``PeerGone``, which needs what ``protocol/core/death.py`` asks for, or its next incarnation.
Without proof it waits, and in the end ends itself; whoever receives the proof of *that* goes on. The patience of
servers differs, so two that are cut from each other do not both end.
"""

from __future__ import annotations

from collections import deque

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.events import LinkLost, LinkUp, PeerGone, Tick
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, ClusterShape, Incarnation, Step, TaskId, server
from lockstep.protocol.core.messages import Done, End, LocalState
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.replication.coordination import Coordination
from lockstep.protocol.replication.replica_events import (
    CopyMade,
    MakeVersion,
    MessageHeard,
    ReplicaEffect,
    ReplicaEvent,
    Say,
    SendValue,
    TaskEnds,
    VersionMade,
)
from lockstep.protocol.replication.replica_messages import (
    CopyOf,
    Decided,
    DecisionHeld,
    DecisionRecord,
    DigestsDiffer,
    Entering,
    Follow,
    GradientOf,
    HeldTo,
    InView,
    ShardsApplied,
    ShardWhole,
    Stamped,
    StepCommitted,
    UpdateFacts,
    UpdateOf,
    ViewOf,
    WantVersion,
)
from lockstep.protocol.replication.shard_copy import ShardCopy
from lockstep.protocol.replication.shard_home import (
    FactsOfSteps,
    HomeBucketState,
    HomeBucketTrigger,
    ShardHome,
)
from lockstep.protocol.replication.speech import Speech
from lockstep.protocol.replication.viewing import PATIENCE_SECONDS, Viewing

DIGEST_EVERY = 50
"""After how many steps both homes compare what they made."""


class ReplicatedServer:
    """One server."""

    def __init__(
        self,
        task: TaskId,
        life: Incarnation,
        shape: ClusterShape,
        buckets: int,
        *,
        returns: bool = False,
        digest_every: int = DIGEST_EVERY,
    ) -> None:
        """``returns``: there is a checkpoint to go back to. ``digest_every``: see ``ShardHome``."""
        self.task = task
        self.shape = shape
        self.viewing = Viewing(task, life, server(0))
        self.coordination = Coordination(shape, returns=returns) if task == server(0) else None
        self.record: DecisionRecord | None = None
        """What this server holds as the deputy."""
        self.homes: dict[int, ShardHome] = {}
        self.copies: dict[int, ShardCopy] = {}
        self.committed: Step = INITIAL_STEP - 1
        self.ended = False
        self._end: End | None = None
        self._returns = returns
        self._digest_every = digest_every
        self._buckets = buckets
        self._facts = FactsOfSteps(shape.worker_ids())
        self._wants: dict[TaskId, WantVersion] = {}
        self._making: dict[BucketId, UpdateOf] = {}
        self._patience = PATIENCE_SECONDS * (shape.servers - task.index) / shape.servers

    # -- the door --

    def start(self, now: float) -> list[ReplicaEffect]:
        return self.handle(LinkUp(self.task, self.viewing.life), now)

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        if self.ended:
            return self._tell_of_the_end(event)
        outgoing: list[ReplicaEffect] = []
        pending: deque[ReplicaEvent] = deque([event])
        while pending and not self.ended:
            for effect in self._handle_one(pending.popleft(), now):
                if isinstance(effect, Say) and effect.peer == self.task:
                    pending.append(MessageHeard(self.task, self.viewing.life, effect.message))
                else:
                    self.ended = self.ended or isinstance(effect, TaskEnds)
                    outgoing.append(effect)
        self.viewing.note(now)
        return outgoing

    def _tell_of_the_end(self, event: ReplicaEvent) -> list[ReplicaEffect]:
        """A task that comes back after the end hears of it."""
        match event:
            case LinkUp(peer=peer) | MessageHeard(peer=peer, message=Entering()) if self._end is not None:
                return [Say(peer, self._end)]
            case _:
                return []

    def _handle_one(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        match event:
            case MessageHeard():
                return self._on_heard(event, now)
            case VersionMade():
                return self._on_made(event)
            case CopyMade():
                return self._on_copy_made(event)
            case LinkUp():
                return self._on_link_up(event, now)
            case LinkLost(peer=peer):
                self.viewing.unlink(peer, now)
                return []
            case PeerGone(peer=peer, incarnation=life):
                return self._on_gone(peer, life, now)
            case Tick():
                return self._on_tick(now)
            case _:
                return []

    # -- links, ends --

    def _on_link_up(self, event: LinkUp, now: float) -> list[ReplicaEffect]:
        peer, life = event.peer, event.incarnation
        former = self.viewing.linked_before.get(peer, life)
        self.viewing.link(peer, life)
        # The next incarnation proves that the former one has ended.
        effects = self._on_gone(peer, former, now) if former != life else []
        if self.ended:
            return effects
        if self.coordination is not None and self.coordination.members.get(peer) == life:
            effects += self.coordination.say_again_to(peer)
        if self.viewing.number == 0:
            return effects + self.viewing.enter()
        if not self.viewing.is_member(peer, life):
            return effects + self.viewing.tell_whom_to_follow(peer)
        return effects + self._say_what_is_open()

    def _on_gone(self, peer: TaskId, life: Incarnation, now: float) -> list[ReplicaEffect]:
        self.viewing.gone.add((peer, life))
        if self.coordination is not None:
            return self.coordination.on_gone(peer, life)
        return self._take_over_if_due() or self._end_if_nobody_is_left(now)

    def _take_over_if_due(self) -> list[ReplicaEffect]:
        """This deputy holds all decisions, and has proof of the coordinator's end."""
        record = self.record
        if record is None or not self._is_gone(record.placement.coordinator, dict(record.members)):
            return []
        if record.placement.deputy != self.task or not record.placement.coordination.whole:
            return []
        self.coordination, effects = Coordination.resume(record, self.shape, self.viewing.gone, returns=self._returns)
        return effects

    def _is_gone(self, task: TaskId, members: dict[TaskId, Incarnation]) -> bool:
        return (task, members.get(task, 0)) in self.viewing.gone

    def _end_if_nobody_is_left(self, now: float) -> list[ReplicaEffect]:
        return [] if self.coordination is not None else self.viewing.end_if_headless(now)

    # -- messages --

    def _on_heard(self, event: MessageHeard, now: float) -> list[ReplicaEffect]:
        peer, life = event.peer, event.incarnation
        match event.message:
            case Stamped():
                message = self.viewing.admit(event)
                return [] if message is None else self._on_message(peer, message)
            case Entering():
                return self._on_entering(peer, life)
            case Follow(coordinator=coordinator, view=view):
                return self._on_follow(coordinator, view)
            case ViewOf() as view:
                return self._on_view(peer, view, now)
            case Decided(record=record):
                return self._on_decided(peer, life, record)
            case DecisionHeld(serial=serial) if self.coordination is not None:
                return self.coordination.on_held(peer, life, serial)
            case End() as end:
                self._end = end
                linked = self.viewing.linked.items()
                strangers = [task for task, life in linked if not self.viewing.is_member(task, life)]
                return [*(Say(task, end) for task in strangers if task != self.task), TaskEnds(end.reason, end)]
            case _:
                return []

    def _on_message(self, peer: TaskId, message: InView) -> list[ReplicaEffect]:
        match message:
            case GradientOf(step=step, bucket=bucket, tensor=tensor):
                home = self._home_of(bucket)
                taken = home is not None and home.take(peer, step, bucket, tensor)
                return self._make() if taken else []
            case UpdateFacts():
                if message.step > self.committed:
                    self._facts.note(peer, message)
                return self._make()
            case WantVersion():
                self._wants[peer] = message
                return self._deliver(peer)
            case UpdateOf():
                return self._on_update(peer, message)
            case CopyOf():
                return self._on_copy(peer, message)
            case HeldTo(bucket=bucket, version=version):
                return self._on_held(bucket, version)
            case StepCommitted(step=step):
                return self._on_committed(step)
            case ShardsApplied() | ShardWhole() | LocalState() | Done() | DigestsDiffer():
                return self._on_word_for_coordinator(peer, message)
            case _:
                return []

    def _on_word_for_coordinator(self, peer: TaskId, message: InView) -> list[ReplicaEffect]:
        coordination = self.coordination
        if coordination is None or coordination.view != self.viewing.number:
            return []  # the next view is decided already, and everything is said again in it
        match message:
            case ShardsApplied(step=step):
                return coordination.on_applied(peer.index, step)
            case ShardWhole(shard=shard):
                return coordination.on_whole(shard, peer)
            case LocalState():
                return coordination.on_state(peer, message)
            case Done(steps=steps):
                return coordination.on_done(peer, steps)
            case DigestsDiffer(step=step, bucket=bucket):
                return coordination.on_differing(coordination.placement.home_of(bucket), step)
            case _:
                return []

    def _on_entering(self, peer: TaskId, life: Incarnation) -> list[ReplicaEffect]:
        if (peer, life) in self.viewing.gone:
            return []  # its last words
        if self.coordination is not None:
            return self.coordination.on_entering(peer, life)
        return self.viewing.tell_whom_to_follow(peer) if self.viewing.number else []

    def _on_follow(self, coordinator: TaskId, view: int) -> list[ReplicaEffect]:
        if self.viewing.number or not self.viewing.follow(coordinator, view):
            return []
        self.coordination = None  # it would have formed another job
        return self.viewing.enter()

    def _on_decided(self, peer: TaskId, life: Incarnation, record: DecisionRecord) -> list[ReplicaEffect]:
        """Hold what the coordinator has decided, unless this server has taken its place."""
        members = dict(record.members)
        is_its = record.placement.coordinator == peer and members.get(peer) == life
        is_for_us = members.get(self.task) == self.viewing.life and record.view >= self.viewing.number
        if self.coordination is not None or not is_its or not is_for_us:
            return []
        if self.record is None or record.serial > self.record.serial:
            self.record = record
        return [Say(peer, DecisionHeld(record.serial)), *self._take_over_if_due()]

    # -- the view --

    def _on_view(self, peer: TaskId, view: ViewOf, now: float) -> list[ReplicaEffect]:
        if view.number <= self.viewing.number or view.placement.coordinator != peer:
            return []
        if dict(view.members).get(self.task) != self.viewing.life:
            return []
        changed = self.viewing.change_to(view)
        self.committed = max(self.committed, view.committed)
        for task in changed:
            self._wants.pop(task, None)
            self._facts.forget(task)
            for home in self.homes.values():
                home.forget(task)
        self._take_places(view.placement)
        effects: list[ReplicaEffect] = []
        if self.coordination is not None:
            strangers = [t for t, life in self.viewing.linked.items() if not self.viewing.is_member(t, life)]
            effects += [effect for task in strangers for effect in self.viewing.tell_whom_to_follow(task)]
        effects += self._say_what_is_open()
        for event in self.viewing.take_postponed():
            effects += self._on_heard(event, now)
        return effects + self._end_if_nobody_is_left(now)

    def _take_places(self, placement: Placement) -> None:
        me = self.task.index
        for shard, homes in enumerate(placement.shards):
            buckets = placement.buckets_of(shard, self._buckets)
            if homes.home == me and shard not in self.homes:
                self.homes[shard] = self._become_home(shard, buckets, whole=homes.whole)
            if homes.second != me:
                if homes.home != me:
                    self.copies.pop(shard, None)
            elif shard not in self.copies:
                # One that is whole and holds nothing: nothing has been made yet.
                self.copies[shard] = ShardCopy(shard, buckets, from_start=homes.whole)

    def _become_home(self, shard: int, buckets: range, *, whole: bool) -> ShardHome:
        """Of nothing at the start; otherwise of what was handed on."""
        copy, every = self.copies.get(shard), self._digest_every
        if copy is None:
            return ShardHome(shard, dict.fromkeys(buckets, INITIAL_STEP), self._facts, whole=whole, digest_every=every)
        versions = {bucket: copy.held(bucket) for bucket in buckets}
        home = ShardHome(shard, versions, self._facts, whole=False, digest_every=every)
        for number, bucket in copy.buckets.items():
            if bucket.made < bucket.held:
                home.buckets[number].state = HomeBucketState.CATCHING_UP
        if copy.is_made:
            del self.copies[shard]
        return home

    def _speech(self) -> Speech:
        return self.viewing.speech()

    def _say_what_is_open(self) -> list[ReplicaEffect]:
        """With every view and every link; receiving it twice changes nothing."""
        effects: list[ReplicaEffect] = []
        speech = self._speech()
        for shard, home in self.homes.items():
            home.committed = max(home.committed, self.committed)
            effects += home.place(self.viewing.placement.shards[shard], speech)
        return effects + self._say_progress() + self._make() + self._deliver_all()

    def _say_progress(self) -> list[ReplicaEffect]:
        """What the coordinator must know."""
        effects: list[ReplicaEffect] = []
        speech, placement = self._speech(), self.viewing.placement
        if self.homes:
            made = min(home.made for home in self.homes.values())
            effects += speech.to(placement.coordinator, ShardsApplied(made))
        for shard, home in self.homes.items():
            if home.may_be_called_whole and not placement.shards[shard].whole:
                effects += speech.to(placement.coordinator, ShardWhole(shard))
        return effects

    # -- steps --

    def _home_of(self, bucket: BucketId) -> ShardHome | None:
        return self.homes.get(self.viewing.placement.shard_of(bucket))

    def _make(self) -> list[ReplicaEffect]:
        effects: list[ReplicaEffect] = []
        for home in self.homes.values():
            effects += home.make_what_is_complete()
        for effect in effects:
            if isinstance(effect, MakeVersion):
                self._making[effect.update.bucket] = effect.update
        return effects

    def _on_made(self, event: VersionMade) -> list[ReplicaEffect]:
        home = self._home_of(event.bucket)
        assert home is not None
        effects = home.on_made(event, self._making.pop(event.bucket), self._speech())
        return effects + self._after_release(event.bucket)

    def _on_held(self, bucket: BucketId, version: int) -> list[ReplicaEffect]:
        home = self._home_of(bucket)
        if home is None:
            return []
        return home.on_held(bucket, version, self._speech()) + self._after_release(bucket)

    def _after_release(self, bucket: BucketId) -> list[ReplicaEffect]:
        return self._deliver_all(bucket) + self._say_progress() + self._make()

    def _on_committed(self, step: Step) -> list[ReplicaEffect]:
        self.committed = max(self.committed, step)
        self._facts.forget_before(self.committed + 1)
        for home in self.homes.values():
            home.committed = self.committed
        return self._say_if_whole() + self._make()

    def _say_if_whole(self) -> list[ReplicaEffect]:
        placement = self.viewing.placement
        whole = [shard for shard, home in self.homes.items() if home.may_be_called_whole]
        unsaid = [shard for shard in whole if not placement.shards[shard].whole]
        return [e for shard in unsaid for e in self._speech().to(placement.coordinator, ShardWhole(shard))]

    # -- versions go out --

    def _deliver_all(self, only: BucketId | None = None) -> list[ReplicaEffect]:
        return [effect for worker in self._wants for effect in self._deliver(worker, only)]

    def _deliver(self, worker: TaskId, only: BucketId | None = None) -> list[ReplicaEffect]:
        want, speech = self._wants[worker], self._speech()
        if not speech.reaches(worker):
            return []
        return [
            SendValue(worker, speech.view, bucket, want.version)
            for home in self.homes.values()
            for bucket in home.buckets
            if bucket not in want.have and only in (None, bucket) and home.readable(bucket, want.version)
        ]

    # -- the second home --

    def _copy_of(self, peer: TaskId, bucket: BucketId) -> ShardCopy | None:
        shard = self.viewing.placement.shard_of(bucket)
        is_home = self.viewing.placement.shards[shard].home_task == peer
        return self.copies.get(shard) if is_home and shard not in self.homes else None

    def _on_update(self, peer: TaskId, update: UpdateOf) -> list[ReplicaEffect]:
        copy = self._copy_of(peer, update.bucket)
        if copy is None:
            return []
        effects = copy.on_update(update)
        return effects + self._speech().to(peer, HeldTo(update.bucket, copy.held(update.bucket)))

    def _on_copy(self, peer: TaskId, message: CopyOf) -> list[ReplicaEffect]:
        copy = self._copy_of(peer, message.bucket)
        if copy is None:
            return []
        effects = copy.on_copy(message)
        return effects + self._speech().to(peer, HeldTo(message.bucket, copy.held(message.bucket)))

    def _on_copy_made(self, event: CopyMade) -> list[ReplicaEffect]:
        shard = self.viewing.placement.shard_of(event.bucket)
        copy = self.copies.get(shard)
        if copy is None:
            return []
        effects, same = copy.on_made(event)
        if not same:
            effects += self._speech().to(self.viewing.placement.coordinator, DigestsDiffer(event.step, event.bucket))
        home, bucket = self.homes.get(shard), copy.buckets[event.bucket]
        if home is None:
            # A copy that came meanwhile may have been taken only now.
            home_task = self.viewing.placement.shards[shard].home_task
            return effects + self._speech().to(home_task, HeldTo(event.bucket, bucket.held))
        if bucket.made < bucket.held:
            return effects
        home.buckets[event.bucket].advance(HomeBucketTrigger.CAUGHT_UP)
        if copy.is_made:
            del self.copies[shard]
        speech = self._speech()
        effects += home.place(self.viewing.placement.shards[shard], speech)
        return effects + self._make() + self._deliver_all(event.bucket)

    # -- time --

    def _needed(self) -> set[TaskId]:
        """The servers without which this one cannot go on."""
        placement = self.viewing.placement
        needed = {placement.coordinator, placement.deputy}
        needed |= {placement.shards[shard].second_task for shard in self.homes}
        if self.task not in (placement.coordinator, placement.deputy):
            needed.discard(placement.deputy)
        return {task for task in needed if task is not None and task != self.task}

    def _waiting(self) -> list[tuple[TaskId, float]]:
        """The servers that this one needs and cannot reach, and since when; nothing proves that they have ended."""
        if self.viewing.number == 0:
            return []
        lost = self.viewing.unreachable
        return [(task, lost[task]) for task in sorted(self._needed()) if task in lost]

    def next_deadline(self) -> float | None:
        if self.ended:
            return None
        due = [since + self._patience for _, since in self._waiting()]
        if self.coordination is None and self.viewing.deadline is not None:
            due.append(self.viewing.deadline)
        return min(due, default=None)

    def _on_tick(self, now: float) -> list[ReplicaEffect]:
        for other, since in self._waiting():
            if now >= since + self._patience:
                text = phrases.second_home_is_silent(now - since)
                return [TaskEnds(Reason(Cause.NO_PATH, text, peer=str(other)))]
        return self._end_if_nobody_is_left(now)

    def waits(self) -> list[Wait]:
        step, kind = self.committed + 1, WaitKind.CONNECTION
        state = phrases.not_connected()
        return [
            Wait(self.task, other, kind, step, since, since + self._patience, state) for other, since in self._waiting()
        ]

    @property
    def has_replica(self) -> bool:
        """Whether the job, as this server knows it, survives the loss of any one server."""
        return self.viewing.number > 0 and self.viewing.placement.whole

    def check(self) -> None:
        for home in self.homes.values():
            home.check()
        for copy in self.copies.values():
            copy.check()
        if self.coordination is not None:
            self.coordination.check()
