"""The coordinator of a job whose servers have second homes: its deputy holds each decision before anything follows.

What it has decided is one value, the ``Resolution``. An event after which that value is another one was a decision:
what the machine wants done then waits until the deputy holds it, and so does whatever comes after. A deputy that is new
holds nothing; nothing waits for it until it holds the newest resolution, and with the next view it may take over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from lockstep.protocol import phrases
from lockstep.protocol.coordinator.calls import KeptCalls
from lockstep.protocol.coordinator.coordinator_machine import (
    JOB_PHASE_TRANSITIONS,
    CoordinatorMachine,
    JobPhase,
    JobPhaseTrigger,
)
from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.coordinator.server_losses import ServerLosses
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import Event, LinkUp, Received, Tick
from lockstep.protocol.core.ids import ClusterShape, Incarnation, JobId, Role, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import (
    Coordinates,
    HandOn,
    Holding,
    Join,
    LocalState,
    Pull,
    Rates,
    Refused,
    Resolution,
    ResolutionHeld,
    SecondWhole,
    StateBefore,
)
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind


class HomedCoordinator(CoordinatorMachine):
    """Decides as every coordinator does; what follows waits for the deputy."""

    def __init__(
        self,
        shape: ClusterShape,
        job: JobId,
        journal: Journal,
        now: float,
        *,
        rules: RecoveryRules,
        beginning: Beginning | None = None,
        placement: Placement | None = None,
        alive: Iterable[TaskId] = (),
    ) -> None:
        super().__init__(shape, job, journal, now, rules=rules, beginning=beginning)
        self.servers: ServerLosses = self._make_losses(shape, placement, alive)
        self._deputy: tuple[TaskId, Incarnation] | None = None
        self._awaits_deputy = False
        self._decided: Resolution | None = None
        self._resolved = 0
        """The number of the newest resolution."""
        self._told_joins = 0
        """The view whose joins the deputy holds, or was sent."""
        self._told_calls = 0
        """How many calls it was told of."""
        self._confirmed = 0
        """The newest resolution that it has said it holds, over the link that there is."""
        self._waiting: deque[tuple[int, list[Effect]]] = deque()
        self._ask_again_at: float | None = None

    @staticmethod
    def _make_losses(shape: ClusterShape, placement: Placement | None, alive: Iterable[TaskId]) -> ServerLosses:
        return ServerLosses(shape, placement, alive)

    @property
    def here(self) -> TaskId:
        """The server that this machine runs on."""
        return self.servers.placement.coordinator

    @classmethod
    def resume(
        cls,
        held: Resolution,
        calls: KeptCalls,
        shape: ClusterShape,
        rules: RecoveryRules,
        journal: Journal,
        reason: Reason,
        now: float,
    ) -> tuple[HomedCoordinator, list[Effect]]:
        """The deputy takes over from a coordinator that has ended for this reason, with what it holds."""
        placement = Placement(held.shards, held.decisions[0])
        beginning = cls._beginning_of(held)
        joined = {TaskId.parse(join.task): join for join in held.joins}
        alive = [task for task in joined if task in shape.homes]
        made = cls(shape, held.job, journal, now, rules=rules, beginning=beginning, placement=placement, alive=alive)
        made.phase = advance(JOB_PHASE_TRANSITIONS, made.phase, JobPhaseTrigger.COMPLETE)
        made._number, made._resolved, made.committed = held.view, held.number, held.step
        made._joined = joined
        made._applied = made.servers.applied_before(held.step)
        made._take_states(held)
        made.norms.take_over(held.norms)
        made.calls.kept = calls
        if rules.save_steps or rules.save_seconds:
            made.saving.owe(now)  # one may have been due, or begun
        # The view tells everybody whose word counts now, also if the word is the end.
        effects = made._on_loss(placement.coordinator, 0, reason, now)
        if held.ends and made.end is None:
            effects += made._finish(held.ends[0], now)
        return made, made._held(effects, now)

    @staticmethod
    def _beginning_of(held: Resolution) -> Beginning:
        return Beginning(checkpoint=held.checkpoint)

    def _take_states(self, held: Resolution) -> None:
        for state in held.states:
            self.states.note(TaskId.parse(state.task), LocalState(held.step + 1, state.data, stuck=state.stuck))

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(message=ResolutionHeld(number=number)):
                return self._on_held(event, number, now)
            case Received(message=SecondWhole() as said) if self._is_member(event.peer, event.incarnation):
                is_news = said.view == self._number and self.servers.shard_is_whole(said.shard, event.peer)
                return self._held(self._new_view(now), now) if is_news and self.end is None else []
            case LinkUp(peer=peer) if self._is_stranger(event):
                return [Send(peer, self.is_here())]
            case LinkUp(peer=peer) if self._deputy is not None and peer == self._deputy[0]:
                self._told_joins = self._told_calls = self._confirmed = 0
                return self._say_resolution(now) + self._held(super().handle(event, now), now)
            case Tick() if self._ask_again_at is not None and now >= self._ask_again_at:
                self._confirmed = 0
                return self._say_resolution(now) + self._held(super().handle(event, now), now)
            case Received(message=Pull() | Rates() | HandOn() | Holding()):
                return []  # nothing is decided by them, and each step has several
            case _:
                return self._held(super().handle(event, now), now)

    def is_here(self) -> Coordinates:
        """What a task that is no member is told: whom it can join."""
        return Coordinates(self.here.index, self._number)

    def is_member(self, task: TaskId, incarnation: Incarnation) -> bool:
        return self._is_member(task, incarnation)

    @property
    def has_replica(self) -> bool:
        """Whether any one server may be lost, as far as this machine knows; and the deputy knows it too."""
        return self.phase is JobPhase.RUNNING and self.servers.placement.whole and not self._waiting

    def _is_stranger(self, event: LinkUp) -> bool:
        """A task whose next incarnation does not know of this job."""
        return self.phase is JobPhase.RUNNING and not self._is_member(event.peer, event.incarnation)

    def _on_join(self, peer: TaskId, join: Join, now: float) -> list[Effect]:
        known = self._joined.get(peer)
        is_new = known is None or known.incarnation != join.incarnation
        if peer.role is not Role.SERVER or self.phase is not JobPhase.RUNNING or not is_new:
            return super()._on_join(peer, join, now)
        if self.servers.has_ended(peer, join.incarnation):
            return []  # its last words
        difference = self._first_different_setting(peer, join)
        if difference is not None:
            return [Send(peer, Refused(difference))]
        effects: list[Effect] = []
        if known is not None:
            # Its next incarnation proves that the former one has ended.
            reason = Reason(Cause.STALE_INCARNATION, phrases.started_again())
            effects += self._on_loss(peer, known.incarnation, reason, now)
        if self.end is not None:
            return effects
        self._journal.record(now, Happening.JOINED, peer=peer)
        self._joined[peer] = join
        self.servers.come_back(peer)
        return effects + self._new_view(now)

    def _held(self, effects: list[Effect], now: float) -> list[Effect]:
        """Of what follows from an event, that which may happen now."""
        freed = self._choose_deputy()
        decided = self._resolution()
        if decided == self._decided:
            if not self._waiting:
                return freed + effects
            self._waiting[-1][1].extend(effects)
            return freed
        self._decided = decided
        self._resolved += 1
        if self._awaits_deputy:
            self._waiting.append((self._resolved, effects))
            return freed + self._say_resolution(now)
        return freed + self._say_resolution(now) + effects

    def _choose_deputy(self) -> list[Effect]:
        """The deputy of the view. The former one has provably ended: what waited for it takes effect."""
        second = self.servers.placement.deputy
        join = None if second is None else self._joined.get(second)
        deputy = None if second is None or join is None else (second, join.incarnation)
        if deputy == self._deputy:
            return []
        self._deputy, self._told_joins, self._told_calls, self._confirmed = deputy, 0, 0, 0
        self._awaits_deputy = deputy is not None and self.servers.placement.coordination.whole
        return [] if self._awaits_deputy else self._release(self._resolved)

    def _resolution(self) -> Resolution | None:
        """All that is decided, without its number and without joins. What is only open (calls that not all have come
        to, norms that are being measured) is said again by whoever waits for it."""
        if not self._number and self.end is None:
            return None
        step = self.committed
        placement = self.servers.placement
        workers = self.shape.worker_ids()
        known = [task for task in workers if self.states.has(task, step + 1)]
        states = [StateBefore(str(t), self.states.of(t, step + 1), self.states.stuck_at(t, step + 1)) for t in known]
        return Resolution(
            self.job,
            0,
            self._number,
            placement.shards,
            (placement.coordination,),
            (),
            step,
            tuple(states),
            self.beginning.checkpoint,
            () if self.end is None else (self.end,),
            self.norms.decided,
            self.calls.kept.complete,
        )

    def _say_resolution(self, now: float) -> list[Effect]:
        if self._deputy is None or self._decided is None:
            self._ask_again_at = None
            return []
        self._ask_again_at = now + REPEAT_SECONDS
        joins = () if self._told_joins == self._number else tuple(self._joined.values())
        self._told_joins = self._number
        told = replace(self._decided, number=self._resolved, joins=joins)
        calls = self._say_calls(self._deputy[0])
        # The deputy has all that was told with the resolution before, and nothing is told with this one.
        follows = self._confirmed == self._resolved - 1 and not joins and not calls
        return [*calls, Send(self._deputy[0], told, overtakes=follows)]

    def _say_calls(self, deputy: TaskId) -> list[Effect]:
        """Each once, before the resolution that counts it: together they may be larger than a message."""
        untold = self.calls.kept.after(self._told_calls)
        if untold and not self._told_calls:
            untold[0] = replace(untold[0], anew=True)
        self._told_calls = self.calls.kept.complete
        return [Send(deputy, call) for call in untold]

    def _on_held(self, event: Received, number: int, now: float) -> list[Effect]:
        if self._deputy != (event.peer, event.incarnation):
            return []
        self._confirmed = max(self._confirmed, number)
        if number == self._resolved:
            self._ask_again_at = None
        if self._awaits_deputy:
            return self._release(number)
        if number != self._resolved or self.end is not None:
            return []
        self._awaits_deputy = True
        self.servers.deputy_is_whole()
        return self._held(self._new_view(now), now)

    def _on_loss(self, task: TaskId, incarnation: Incarnation, reason: Reason, now: float) -> list[Effect]:
        deputy = self._deputy
        if self.end is not None and deputy is not None and deputy[0] == task and incarnation in (0, deputy[1]):
            # There is no next view to choose another in, and the end must not wait for one that has ended.
            self._joined.pop(task, None)
            self.servers.lose(*deputy)
            return []
        return super()._on_loss(task, incarnation, reason, now)

    def _release(self, number: int) -> list[Effect]:
        effects: list[Effect] = []
        while self._waiting and self._waiting[0][0] <= number:
            effects += self._waiting.popleft()[1]
        return effects

    # -- time, and what others may ask --

    def next_deadline(self) -> float | None:
        due = [at for at in (super().next_deadline(), self._ask_again_at) if at is not None]
        return min(due, default=None)

    def waits(self) -> list[Wait]:
        found = super().waits()
        if self._waiting and self._deputy is not None and self._ask_again_at is not None:
            since, step = self._ask_again_at - REPEAT_SECONDS, self._steps_seen()
            state = phrases.told_of_a_decision()
            found.append(Wait(self.here, self._deputy[0], WaitKind.HOLDING, step, since, self._ask_again_at, state))
        return found
