"""The machine of one worker: what becomes of each bucket in a step.

The states of a bucket are in ``holdings.py``. The requests: ``Open`` of a server asks for gradients, ``Pull`` of this
machine asks for parameters. Both are repeated until satisfied, so a lost message delays a step and never ends it.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import Effect, GiveBack, Send, SendGradient, SendPull, VersionReady
from lockstep.protocol.core.errors import LocalProtocolError, RemoteProtocolError
from lockstep.protocol.core.events import (
    Asked,
    Event,
    Finished,
    LinkLost,
    LinkUp,
    Prepared,
    Produced,
    Received,
    Sealed,
    StateTaken,
    StepBegun,
    TensorKind,
    Tick,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, ClusterShape, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.keys import TensorKey, parameter_name
from lockstep.protocol.core.messages import (
    Answer,
    Grant,
    Layout,
    LocalState,
    Open,
    TotalNorm,
    View,
)
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.core.timing import REPEAT_SECONDS, RESEND_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.worker.holdings import (
    HeldBucket,
    HeldBucketState,
    HeldBucketTrigger,
    ServerSide,
)
from lockstep.protocol.worker.norm_questions import NormQuestions
from lockstep.protocol.worker.own_states import OwnStates
from lockstep.protocol.worker.questions import Questions
from lockstep.protocol.worker.statements import Statements


class WorkerMachine:
    """One worker's side of every step."""

    def __init__(
        self,
        task: TaskId,
        shape: ClusterShape,
        journal: Journal,
        *,
        eager: bool,
        may_lag: bool = False,
        tells_state: bool = False,
    ) -> None:
        """``eager``: nothing is edited after backward, so a bucket may be applied before this worker's seal.

        ``may_lag``: steps may complete without this worker (backup workers); it then continues with the newest version.
        ``tells_state``: its local state goes to the coordinator with each seal, for its next incarnation.
        """
        self.task = task
        self.eager = eager
        self.may_lag = may_lag
        self.questions = Questions()
        self.norms = NormQuestions(shape.coordinator)
        self.step: Step = INITIAL_STEP
        self._journal = journal
        self._layout: Layout | None = None
        self._coordinator = shape.coordinator
        self._homes = shape.homes
        self._servers = {home: ServerSide(home) for home in self._homes}
        """The tasks that hold buckets, by the plan's numbers; without servers they are workers, this one among them."""
        self._buckets: list[HeldBucket] = []
        self._target = INITIAL_STEP
        self._sealed: Step = INITIAL_STEP - 1
        self._stated = Statements(self._servers)
        self._tells_state = tells_state
        self._states = OwnStates()
        self._view = 0
        """The number of the view that names the homes of the shards, where they have second homes."""
        self._shards: tuple[TaskId, ...] = self._homes
        """The home of each shard of the plan."""

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Produced():
                return self._on_produced(event, now)
            case VersionArrived():
                return self._on_version_arrived(event, now)
            case TransferEnded(kind=TensorKind.GRADIENT):
                return self._on_transfer_ended(event, now)
            case Received(message=View() as view):
                return self._on_view(view, now)
            case Received():
                return self._on_received(event, now)
            case StepBegun():
                return self._on_step_begun(event, now)
            case Sealed():
                return self._on_sealed(event, now)
            case StateTaken():
                return self._on_state_taken(event)
            case LinkUp():
                return self._on_link_up(event, now)
            case LinkLost():
                return self._on_link_lost(event, now)
            case Tick():
                return self._on_tick(now)
            case Prepared(layout=Layout() as layout):
                return self._on_prepared(event.plan, layout, now)
            case Finished():
                return self._on_finished(event, now)
            case Asked(question=question, peer=peer):
                asked = self.home_of(question.bucket) if peer is None else peer
                return self.questions.ask(asked, replace(question, view=self._view), now, of_home=peer is None)
            case _:
                return []

    # -- events of the training loop --

    def _on_prepared(self, plan: Plan, layout: Layout, now: float) -> list[Effect]:
        """The model is known: announce it to every server and ask for the version of the first step."""
        self._layout = layout
        self._adopt(plan)
        self._target = max(layout.start, 0)
        self.step = layout.start - 1 if layout.start > INITIAL_STEP else INITIAL_STEP
        effects: list[Effect] = []
        for peer in self._servers.values():
            peer.since, peer.awaited = now, len(peer.buckets)
            if peer.linked:
                effects += self._statements(peer, now)
        return effects

    def _adopt(self, plan: Plan) -> None:
        for bucket in plan.buckets:
            mine = HeldBucket(bucket.id, self._shards[bucket.server], shard=bucket.server)
            self._buckets.append(mine)
            self._servers[mine.server].buckets.append(mine)

    def _on_step_begun(self, event: StepBegun, now: float) -> list[Effect]:
        if event.step != self.step + 1 and not (self.may_lag and event.step == self._target > self.step):
            raise LocalProtocolError(f"{self.task} began step {event.step} after step {self.step}")
        self.step = event.step
        self._stated.begin_step()
        self.norms.number = 0
        for bucket in self._buckets:
            bucket.edition, bucket.absent = -1, False
        effects = self._stated.state_rates(self.step, event.rates)
        asks = self.eager and self._is_first_to_deliver
        return effects + self._ask_for(self.step + 1, now) if asks else effects

    @property
    def _is_first_to_deliver(self) -> bool:
        """A former incarnation may have delivered its gradients of the first two steps of this one: servers may have
        applied them already, and the next version would come at once, into memory that is in use."""
        assert self._layout is not None
        return not self._tells_state or self.step > self._layout.start + 1

    def _ask_for_next(self, now: float) -> list[Effect]:
        """The step is sealed. Buckets may still follow the seal."""
        if not self._is_first_to_deliver and any(b.edition < 0 and not b.absent for b in self._buckets):
            return []
        return self._ask_for(max(self.step + 1, self._newest_open()), now)

    def _on_produced(self, event: Produced, now: float) -> list[Effect]:
        bucket = self._buckets[event.bucket]
        if event.step != self.step:
            raise LocalProtocolError(f"bucket {event.bucket} of step {event.step} was produced in step {self.step}")
        if event.step != INITIAL_STEP and bucket.version != event.step:
            raise LocalProtocolError(
                f"bucket {event.bucket} produced a gradient of step {event.step} from version {bucket.version}"
            )
        self._refuse_change(bucket, "produced again")
        bucket.go(HeldBucketTrigger.PRODUCE)
        bucket.edition += 1
        bucket.offers = 0
        self._journal.record(now, Happening.PRODUCED, event.step, event.bucket, bucket.server)
        effects = self._start_if_possible(bucket, now)
        return effects + self._ask_for_next(now) if self._sealed == self.step else effects

    def _on_sealed(self, event: Sealed, now: float) -> list[Effect]:
        if event.step != self.step:
            raise LocalProtocolError(f"{self.task} sealed step {event.step} in step {self.step}")
        absent = set(event.absent)
        if event.asks:
            return self._ask_norm(event, absent, now)
        self._sealed = event.step
        for bucket in self._buckets:
            bucket.absent = bucket.id in absent
            if bucket.absent and bucket.version == event.step:
                self._refuse_change(bucket, "taken back")
                bucket.go(HeldBucketTrigger.SKIP)
        if self.norms.number and not any(clip.by_norm for clip in event.clip):
            self.norms.number += 1  # the question was given up: this is not the step that it was about
        effects = self._stated.state_rates(self.step, event.rates)
        if not self.eager or absent:
            effects += self._send_seals(event, absent)
        self._journal.record(now, Happening.SEALED, event.step)
        if self._tells_state and event.state is not None:
            effects += self._tell_state(LocalState(event.step + 1, event.state))
        return effects + self._ask_for_next(now)

    def _ask_norm(self, event: Sealed, absent: set[BucketId], now: float) -> list[Effect]:
        """The training loop wants to know the norm of the mean of what has been produced."""
        self.norms.number += 1
        effects = self._send_seals(event, absent)
        self._journal.record(now, Happening.REQUESTED, event.step, cause="the norm of the mean")
        self.norms.ask(self._stated.seals[self._coordinator], now)
        return effects

    def _on_state_taken(self, event: StateTaken) -> list[Effect]:
        if event.step > self.step + 1:
            raise LocalProtocolError(f"{self.task} sent its state before step {event.step} in step {self.step}")
        return self._tell_state(LocalState(event.step, event.data, stuck=event.stuck)) if self._tells_state else []

    def _tell_state(self, state: LocalState) -> list[Effect]:
        """What the next incarnation of this worker would need."""
        said = self._states.add(state)
        return [Send(self._coordinator, said)] if self._servers[self._coordinator].linked else []

    def _refuse_change(self, bucket: HeldBucket, how: str) -> None:
        """What has left may have been applied already, unless the servers wait for the seal."""
        if self.eager and bucket.edition >= 0:
            raise LocalProtocolError(f"bucket {bucket.id} of step {self.step} was {how} after it may have been applied")

    def _send_seals(self, event: Sealed, absent: set[BucketId]) -> list[Effect]:
        # Where a server may become the home of any bucket, it must know of all.
        return self._stated.seal(event, absent, self.norms.number, self._buckets if self._view else None)

    def _on_finished(self, event: Finished, now: float) -> list[Effect]:
        self._journal.record(now, Happening.ENDED, event.steps, cause="this worker has finished")
        return self._stated.finish(event.steps)

    # -- asking for parameters --

    def _ask_for(self, version: int, now: float) -> list[Effect]:
        if version <= self._target:
            return []
        self._target = version
        for peer in self._servers.values():
            peer.awaited, peer.since = len(peer.buckets), now
        return [self._pull(peer, now) for peer in self._servers.values() if peer.linked]

    def _newest_open(self) -> Step:
        return max(peer.open_step for peer in self._servers.values()) if self.may_lag else INITIAL_STEP

    def _catch_up(self, now: float) -> list[Effect]:
        """The others went on without this worker, and the version it waits for is gone: ask for the newest instead."""
        waiting = any(peer.awaited for peer in self._servers.values())
        return self._ask_for(self._newest_open(), now) if waiting else []

    def _pull(self, peer: ServerSide, now: float) -> SendPull:
        peer.repeat_at = now + REPEAT_SECONDS
        have = tuple(b.id for b in peer.buckets if b.version >= self._target)
        self._journal.record(now, Happening.REQUESTED, self._target, peer=peer.id)
        return SendPull(peer.id, self._target, have, self._view)

    def _on_version_arrived(self, event: VersionArrived, now: float) -> list[Effect]:
        refusal = self._why_refused(event)
        if refusal is not None:
            self._journal.record(now, Happening.DROPPED, event.version, event.bucket, event.peer, refusal)
            return [GiveBack(event.arrival)] if event.arrival else []
        bucket = self._buckets[event.bucket]
        bucket.go(HeldBucketTrigger.ARRIVE)
        bucket.version = event.version
        self._servers[bucket.server].awaited -= 1
        self._journal.record(now, Happening.ARRIVED, event.version, event.bucket, event.peer)
        return [VersionReady(event.bucket, event.version, event.arrival)]

    def _why_refused(self, event: VersionArrived) -> str | None:
        if not 0 <= event.bucket < len(self._buckets) or self._buckets[event.bucket].server != event.peer:
            return "not a bucket of this server"
        if event.version != self._target or self._buckets[event.bucket].version >= event.version:
            return "stale version"
        return None

    # -- handing gradients over --

    def _start_if_possible(self, bucket: HeldBucket, now: float) -> list[Effect]:
        peer = self._servers[bucket.server]
        if bucket.state is not HeldBucketState.PRODUCED or bucket.busy:
            return []
        if not peer.linked or peer.grant is None or peer.open_step != self.step:
            return []
        bucket.go(HeldBucketTrigger.START)
        bucket.busy, bucket.offered_at = True, now
        bucket.offers += 1
        self._journal.record(now, Happening.IN_FLIGHT, self.step, bucket.id, peer.id)
        return [SendGradient(peer.id, self.step, bucket.id, bucket.edition, peer.grant)]

    def _on_transfer_ended(self, event: TransferEnded, now: float) -> list[Effect]:
        bucket = self._buckets[event.bucket]
        if event.peer != bucket.server:
            return []  # of a former home
        bucket.busy = False
        if event.ok:
            self._journal.record(now, Happening.SENT, event.number, event.bucket, event.peer)
        elif event.number == self.step:
            bucket.fail()
        return self._start_if_possible(bucket, now)

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        peer = self._servers.get(event.peer)
        if peer is None or event.incarnation != peer.incarnation:
            return []
        match event.message:
            case Open():
                return self._on_open(peer, event.message, now)
            case Grant(ticket=ticket):
                peer.grant = ticket
                return self._start_all(peer, now)
            case Answer() as answer:
                return self.questions.on_answer(event.peer, answer)
            case TotalNorm() as total:
                return self.norms.on_total(total)
            case _:
                return []

    def _on_view(self, view: View, now: float) -> list[Effect]:
        """The homes of the shards, where they have second homes. What a lost home had is sent to the next one."""
        if not view.shards or view.number <= self._view:
            return []
        self._view = view.number
        self._shards = tuple(homes.home_task for homes in view.shards)
        self._coordinator = self.norms.coordinator = view.decisions[0].home_task
        moved = [bucket for bucket in self._buckets if bucket.server != self._shards[bucket.shard]]
        for bucket in moved:
            self._move(bucket, self._shards[bucket.shard])
        effects: list[Effect] = []
        for peer in [self._servers[home] for home in dict.fromkeys(bucket.server for bucket in moved)]:
            peer.buckets.sort(key=lambda bucket: bucket.id)
            peer.since, peer.open_step = now, INITIAL_STEP - 1
        for peer in self._servers.values():
            peer.awaited = sum(1 for bucket in peer.buckets if bucket.version < self._target)
            if peer.linked and self._layout is not None:
                effects += self._statements(peer, now)
        return effects + self._take_early_opens(now) + self.questions.ask_homes(self.home_of, self._view, now)

    def _take_early_opens(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for peer in self._servers.values():
            early, peer.early_open = peer.early_open, None
            if early is not None:
                effects += self._on_open(peer, early, now)
        return effects

    def _move(self, bucket: HeldBucket, home: TaskId) -> None:
        self._servers[bucket.server].buckets.remove(bucket)
        self._servers[home].buckets.append(bucket)
        bucket.move(home)

    def _on_open(self, peer: ServerSide, message: Open, now: float) -> list[Effect]:
        if message.view < self._view:
            return []  # it does not know yet which buckets are its own
        if message.view > self._view:
            peer.early_open = message  # this worker does not
            return []
        if message.step < peer.open_step:
            self._journal.record(now, Happening.DROPPED, message.step, peer=peer.id, cause="stale open")
            return []
        # A worker that comes back begins with steps that some servers may have applied already.
        start = INITIAL_STEP if self._layout is None else self._layout.start
        if message.step > max(self.step + 1, start + 2) and not self.may_lag:
            raise RemoteProtocolError(peer.id, phrases.opened_too_early(peer.id, message.step, self.task, self.step))
        peer.open_step = message.step
        self._journal.record(now, Happening.REQUEST_SEEN, message.step, peer=peer.id)
        # The step before that was applied, so the one before it was committed, which required the states.
        self._states.confirm_before(message.step)
        if message.step != self.step:
            return self._catch_up(now)
        self._note_what_it_has(peer, message, now)
        return self._start_all(peer, now)

    def _note_what_it_has(self, peer: ServerSide, message: Open, now: float) -> None:
        have = set(message.have)
        for bucket in peer.buckets:
            is_open = bucket.state in (HeldBucketState.PRODUCED, HeldBucketState.OFFERED)
            if is_open and bucket.id in have and bucket.edition == 0:
                bucket.go(HeldBucketTrigger.CONFIRM)
            elif bucket.id not in have and bucket.state is HeldBucketState.OFFERED and not bucket.busy:
                patience = RESEND_SECONDS * 2 ** (bucket.offers - 1)
                if now - bucket.offered_at >= patience:
                    bucket.go(HeldBucketTrigger.FAIL)
                    self._journal.record(now, Happening.REPEATED, self.step, bucket.id, peer.id, "asked for again")

    def _start_all(self, peer: ServerSide, now: float) -> list[Effect]:
        return [effect for bucket in peer.buckets for effect in self._start_if_possible(bucket, now)]

    # -- links and time --

    def _on_link_up(self, event: LinkUp, now: float) -> list[Effect]:
        peer = self._servers.get(event.peer)
        if peer is None:
            return []
        peer.linked, peer.incarnation = True, event.incarnation
        self._journal.record(now, Happening.LINK_UP, peer=event.peer)
        asked = self.questions.on_link_up(event.peer, now)
        return asked + self._statements(peer, now) if self._layout is not None else asked

    def _statements(self, peer: ServerSide, now: float) -> list[Effect]:
        """All that this server must know about this worker. Idempotent, so it is sent again on every new link."""
        assert self._layout is not None
        effects: list[Effect] = [Send(peer.id, self._layout)] if peer.grant is None else []
        effects += [self._pull(peer, now), *self._stated.again(peer.id)]
        if peer.id == self._coordinator:
            effects += self.norms.on_link_up(now)
            effects += [Send(peer.id, state) for state in self._states.unconfirmed()]
        return effects

    def _on_link_lost(self, event: LinkLost, now: float) -> list[Effect]:
        peer = self._servers.get(event.peer)
        if peer is None or not peer.linked:
            return []
        peer.lose_link()
        self._journal.record(now, Happening.LINK_LOST, peer=event.peer, cause=event.reason)
        return []

    def _on_tick(self, now: float) -> list[Effect]:
        effects = self.questions.on_tick(now) + self.norms.on_tick(now)
        for peer in self._servers.values():
            if self._needs(peer) and now >= peer.repeat_at:
                effects += self._statements(peer, now)
        return effects

    def _needs(self, peer: ServerSide) -> bool:
        """Whether this server can be asked and owes something: buckets, or (one without buckets too) its grant."""
        if not peer.linked or self._layout is None:
            return False
        if peer.awaited > 0 or peer.grant is None:
            return True
        # Another server may owe a bucket because the coordinator has not received a state, and cannot commit.
        waiting = any(other.awaited for other in self._servers.values())
        return waiting and bool(self._states.unconfirmed()) and peer.id == self._coordinator

    def next_deadline(self) -> float | None:
        due = [peer.repeat_at for peer in self._servers.values() if self._needs(peer)]
        asked = (self.questions.next_deadline(), self.norms.next_deadline())
        return min([*due, *(at for at in asked if at is not None)], default=None)

    # -- what others may ask --

    def home_of(self, bucket: BucketId) -> TaskId:
        """The task that makes the versions of this bucket."""
        return self._buckets[bucket].server

    def holds(self, version: int) -> bool:
        """Whether every bucket is at ``version`` or newer."""
        return all(peer.awaited == 0 for peer in self._servers.values()) and self._target >= version

    def waits(self) -> list[Wait]:
        found: list[Wait] = []
        for peer in self._servers.values():
            if not peer.awaited:
                continue
            missing = next(b for b in peer.buckets if b.version < self._target)
            key = TensorKey(peer.id, peer.incarnation, self.task, parameter_name(missing.id))
            outstanding = phrases.buckets_outstanding(phrases.requested(), peer.awaited)
            state = outstanding if peer.linked else phrases.not_connected()
            step, since, due = self._target - 1, peer.since, peer.repeat_at
            found.append(Wait(self.task, peer.id, WaitKind.PARAMETER, step, since, due, state, key, missing.id))
        return found + self.norms.waits(self.task) + self.questions.waits(self.task, self.step)

    def snapshot(self) -> dict[str, object]:
        return {
            "task": str(self.task),
            "step": self.step,
            "wants_version": self._target,
            "sealed": self._sealed,
            "buckets": [
                {"id": b.id, "server": b.server.index, "state": b.state.value, "version": b.version, "busy": b.busy}
                for b in self._buckets
            ],
            "servers": [
                {"task": str(p.id), "linked": p.linked, "open_step": p.open_step, "awaited": p.awaited}
                for p in self._servers.values()
            ],
        }

    def check(self) -> None:
        for peer in self._servers.values():
            missing = sum(1 for b in peer.buckets if b.version < self._target)
            assert peer.awaited == missing, f"{peer.id}: {peer.awaited} awaited, {missing} missing"
            assert not (self._needs(peer) and peer.repeat_at <= 0), f"{peer.id}: a wait without a deadline"
        for bucket in self._buckets:
            assert bucket.version <= self._target, f"bucket {bucket.id} is ahead of what was asked for"
