"""The machine for a task's membership: it joins, receives the view, and leaves when the job ends.

::

    OUTSIDE   no link to the coordinator yet
    JOINING   the join was sent; it is repeated until the view comes
    MEMBER    the view has come
    ENDED     the job is over for this task
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import NO_REASON, Cause, Reason
from lockstep.protocol.core.effects import BecameMember, Effect, JobEnded, PeerLeaves, Send, StillMissing, ViewChanged
from lockstep.protocol.core.events import (
    Broken,
    Event,
    Finished,
    LinkLost,
    LinkUp,
    PeerGone,
    Received,
    SignalCame,
    Tick,
)
from lockstep.protocol.core.ids import INITIAL_STEP, Incarnation, JobId, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import (
    Done,
    End,
    Failed,
    Join,
    Leaving,
    Left,
    Lost,
    MissingTask,
    Refused,
    Roster,
    View,
)
from lockstep.protocol.core.timing import REPEAT_SECONDS, STALE_ROSTER_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind


class MemberPhase(StrEnum):
    OUTSIDE = "outside"
    JOINING = "joining"
    MEMBER = "member"
    ENDED = "ended"


class MemberPhaseTrigger(StrEnum):
    LINK_UP = "the coordinator can be reached"
    LINK_LOST = "the coordinator cannot be reached"
    VIEW = "the view came"
    END = "the job ended, or this task was refused"


MEMBER_PHASE_TRANSITIONS: Mapping[tuple[MemberPhase, MemberPhaseTrigger], MemberPhase] = MappingProxyType(
    {
        (MemberPhase.OUTSIDE, MemberPhaseTrigger.LINK_UP): MemberPhase.JOINING,
        (MemberPhase.OUTSIDE, MemberPhaseTrigger.LINK_LOST): MemberPhase.OUTSIDE,
        (MemberPhase.OUTSIDE, MemberPhaseTrigger.END): MemberPhase.ENDED,
        (MemberPhase.JOINING, MemberPhaseTrigger.LINK_UP): MemberPhase.JOINING,
        (MemberPhase.JOINING, MemberPhaseTrigger.LINK_LOST): MemberPhase.OUTSIDE,
        (MemberPhase.JOINING, MemberPhaseTrigger.VIEW): MemberPhase.MEMBER,
        (MemberPhase.JOINING, MemberPhaseTrigger.END): MemberPhase.ENDED,
        (MemberPhase.MEMBER, MemberPhaseTrigger.LINK_UP): MemberPhase.MEMBER,
        (MemberPhase.MEMBER, MemberPhaseTrigger.LINK_LOST): MemberPhase.MEMBER,
        (MemberPhase.MEMBER, MemberPhaseTrigger.END): MemberPhase.ENDED,
    }
)


class MemberMachine:
    """One task's own membership."""

    def __init__(
        self,
        task: TaskId,
        coordinator: TaskId,
        join: Join,
        deadline: float,
        journal: Journal,
        now: float,
        *,
        returns: bool = False,
    ) -> None:
        """``deadline``: when the cluster must be complete (``--startup_timeout`` from the start). ``returns``: a job
        that loses a task that holds buckets, even the coordinator's, starts again from its newest checkpoint."""
        self.task = task
        self.coordinator = coordinator
        self.phase = MemberPhase.OUTSIDE
        self.job: JobId = 0
        self._join = join
        self._journal = journal
        self._since = now
        self._deadline = deadline
        self._linked = False
        self._coordinator_life: Incarnation = 0
        """The incarnation of the coordinator that this task was last linked to."""
        self._repeat_at = now + REPEAT_SECONDS
        self._done: Done | None = None
        self._failed: Failed | None = None
        self._departure: Departure | None = None
        """The signal that this task received."""
        self._missing: tuple[MissingTask, ...] = ()
        self._returns = returns
        self._view = 0
        self._lives: dict[TaskId, Incarnation] = {}
        self._losses: dict[TaskId, Lost] = {}
        """What this task has found out and the coordinator has not yet acted on."""
        self.awaited: frozenset[TaskId] = frozenset()
        """Members that were lost and are waited for, according to the coordinator."""
        self._roster_at = now
        """When the coordinator last reported who is missing."""

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.phase is MemberPhase.ENDED:
            return []
        match event:
            case LinkUp(peer=peer) if peer == self.coordinator:
                return self._on_link_up(event, now)
            case LinkUp() if event.peer in self._losses:
                return self._on_found_again(event)
            case LinkLost(peer=peer) if peer == self.coordinator:
                return self._on_link_lost(event, now)
            case PeerGone(peer=peer):
                return self._on_peer_gone(event, now)
            case Received(peer=peer) if peer == self.coordinator:
                return self._on_received(event, now)
            case Finished():
                self._done = Done(event.steps)
                self._since = now
                self._repeat_at = now + REPEAT_SECONDS
                return [Send(self.coordinator, self._done)]
            case Broken():
                return self._on_broken(event, now)
            case SignalCame():
                return self._on_signal(event.departure, now)
            case Tick():
                return self._on_tick(now)
            case _:
                return []

    def _on_link_up(self, event: LinkUp, now: float) -> list[Effect]:
        known, self._coordinator_life = self._coordinator_life, event.incarnation
        if self._returns and known not in (0, event.incarnation):
            # Before its view came, this task may have worked for the former coordinator's job: its memory is stale.
            reason = Reason(Cause.STALE_INCARNATION, phrases.started_again())
            return self._on_peer_gone(PeerGone(self.coordinator, reason, known), now)
        self._linked = True
        self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.LINK_UP)
        return self._statements(now)

    def _statements(self, now: float) -> list[Effect]:
        self._repeat_at = now + REPEAT_SECONDS
        effects: list[Effect] = []
        if self.phase is MemberPhase.JOINING:
            effects.append(Send(self.coordinator, self._join))
        if self._done is not None:
            effects.append(Send(self.coordinator, self._done))
        if self._failed is not None:
            effects.append(Send(self.coordinator, self._failed))
        if self._departure is not None:
            effects.append(Send(self.coordinator, Leaving(self._departure)))
        return effects + [Send(self.coordinator, lost) for lost in self._losses.values()]

    def _on_link_lost(self, event: LinkLost, now: float) -> list[Effect]:
        self._linked = False
        self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.LINK_LOST)
        self._journal.record(now, Happening.LINK_LOST, peer=self.coordinator, cause=event.reason)
        return []

    def _on_peer_gone(self, event: PeerGone, now: float) -> list[Effect]:
        """Notify the coordinator. If it is the one that is gone, no task is left to decide, and the job ends here."""
        if event.peer == self.coordinator:
            culprit, reason = self._why_coordinator_gone(event)
            return self._end(False, culprit, reason, now, again=self._returns and not event.reason.refuses_to_return)
        known = self._lives.get(event.peer, 0)
        if event.incarnation and known and event.incarnation != known:
            return []  # an incarnation that the cluster has forgotten already
        lost = Lost(str(event.peer), event.incarnation or known, event.reason)
        self._losses[event.peer] = lost
        self._repeat_at = now + REPEAT_SECONDS
        return [Send(self.coordinator, lost)] if self._linked else []

    def _why_coordinator_gone(self, event: PeerGone) -> tuple[str, Reason]:
        """The coordinator ended; or another task that holds buckets did, and the coordinator restarted before its
        message came."""
        lost = next((lost for task, lost in self._losses.items() if task.role is self.coordinator.role), None)
        return (str(event.peer), event.reason) if lost is None else (lost.task, lost.reason)

    def _on_found_again(self, event: LinkUp) -> list[Effect]:
        """A task that counted as lost has a link again: it is alive, or another incarnation of it is here."""
        lost = self._losses.pop(event.peer)
        if lost.incarnation != event.incarnation or not self._linked:
            return []
        return [Send(self.coordinator, Lost(lost.task, lost.incarnation, NO_REASON, lives=True))]

    def _on_broken(self, event: Broken, now: float) -> list[Effect]:
        if self._failed is not None:
            return []
        if not self._linked:
            return self._end(False, str(event.culprit), event.reason, now)
        self._failed = Failed(str(event.culprit), event.step, event.reason)
        self._repeat_at = now + REPEAT_SECONDS
        return [Send(self.coordinator, self._failed)]

    def _on_signal(self, departure: Departure, now: float) -> list[Effect]:
        """The work continues until the coordinator lets this task go or ends the job."""
        if self._departure is not None:
            return []
        self._departure = departure
        if not self._linked:
            return self._leave_alone(departure, now)
        self._repeat_at = now + REPEAT_SECONDS
        return [Send(self.coordinator, Leaving(departure))]

    def _on_left(self, left: Left, now: float) -> list[Effect]:
        departure = Departure.of(left.signal)
        if departure is None:
            return []
        if left.task == str(self.task):
            return self._leave_alone(departure, now)
        return [PeerLeaves(TaskId.parse(left.task), departure)]

    def _leave_alone(self, departure: Departure, now: float) -> list[Effect]:
        reason = Reason(Cause.STOPPED, phrases.left(departure))
        return self._end(False, str(self.task), reason, now, alone=True)

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        match event.message:
            case Left() as left:
                return self._on_left(left, now)
            case View() as view:
                return self._on_view(view, now)
            case Roster(missing=missing):
                self._roster_at = now
                return self._on_roster(missing)
            case Refused(reason=reason):
                return self._end(False, str(self.task), reason, now)
            case End() as end:
                departure = Departure.of(end.departure)
                return self._end(end.ok, end.culprit, end.reason, now, end.step, again=end.again, departure=departure)
            case _:
                return []

    def _on_roster(self, missing: tuple[MissingTask, ...]) -> list[Effect]:
        """Who has not joined yet; or, without an address, who was lost while the job ran."""
        if self.phase is MemberPhase.JOINING:
            self._missing = missing
            return [StillMissing(missing)]
        lost = tuple(one for one in missing if not one.address)
        self.awaited = frozenset(TaskId.parse(one.task) for one in lost if one.attempts)
        return [StillMissing(lost)] if lost and self.phase is MemberPhase.MEMBER else []

    def _on_view(self, view: View, now: float) -> list[Effect]:
        if self.phase not in (MemberPhase.JOINING, MemberPhase.MEMBER) or view.number <= self._view:
            return []
        self._view = view.number
        self._lives = {TaskId.parse(member.task): member.incarnation for member in view.members}
        for peer in [p for p, lost in self._losses.items() if self._lives.get(p) != lost.incarnation]:
            del self._losses[peer]
        self._journal.record(now, Happening.VIEW)
        if self.phase is MemberPhase.MEMBER:
            return [ViewChanged(view.members)]
        self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.VIEW)
        self.job = view.job
        return [BecameMember(view.job, view.members, view.start, view.state, view.checkpoint)]

    def _end(
        self,
        ok: bool,
        culprit: str,
        reason: Reason,
        now: float,
        step: int = INITIAL_STEP,
        *,
        again: bool = False,
        departure: Departure | None = None,
        alone: bool = False,
    ) -> list[Effect]:
        if self._departure is not None and not ok:
            again, departure = False, self._departure  # a task that was asked to leave does not start again
        self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.END)
        self._journal.record(now, Happening.ENDED, step, cause=reason.text)
        return [JobEnded(ok, culprit, step, reason, again, departure, alone)]

    # -- time, and what others may ask --

    def _on_tick(self, now: float) -> list[Effect]:
        if self.phase in (MemberPhase.OUTSIDE, MemberPhase.JOINING) and now >= self._deadline:
            return self._give_up(now)
        if self._linked and now >= self._repeat_at:
            return self._statements(now)
        return []

    def _give_up(self, now: float) -> list[Effect]:
        waited = now - self._since
        if self.phase is MemberPhase.OUTSIDE:
            culprit, reason = str(self.coordinator), Reason(Cause.NEVER_STARTED, phrases.not_reached(waited))
        elif not self._missing or self._coordinator_is_silent(now):
            culprit, reason = str(self.coordinator), Reason(Cause.COMMUNICATION, phrases.join_not_answered(waited))
        else:
            culprit = self._missing[0].task
            reason = Reason(Cause.NEVER_STARTED, phrases.cluster_not_complete(waited, self._missing))
        # The other waiting tasks receive the reason, instead of finding later that one more task is missing.
        told: list[Effect] = [Send(self.coordinator, Failed(culprit, INITIAL_STEP, reason))] if self._linked else []
        return told + self._end(False, culprit, reason, now)

    def _coordinator_is_silent(self, now: float) -> bool:
        """Whether its last report of missing tasks is too old to trust; a coordinator on this task is never silent."""
        return self.task != self.coordinator and now - self._roster_at > STALE_ROSTER_SECONDS

    def next_deadline(self) -> float | None:
        match self.phase:
            case MemberPhase.ENDED:
                return None
            case MemberPhase.OUTSIDE:
                return self._deadline
            case MemberPhase.JOINING:
                return min(self._repeat_at, self._deadline)
            case MemberPhase.MEMBER:
                statements = (self._done, self._failed, self._departure)
                speaking = bool(self._losses) or any(one is not None for one in statements)
                return self._repeat_at if speaking and self._linked else None

    def waits(self) -> list[Wait]:
        kind = {MemberPhase.OUTSIDE: WaitKind.CONNECTION, MemberPhase.JOINING: WaitKind.COMPLETE}.get(self.phase)
        if self.phase is MemberPhase.MEMBER and self._done is not None:
            kind = WaitKind.END
        if kind is None:
            return []
        due = self.next_deadline() or self._deadline
        return [Wait(self.task, self.coordinator, kind, INITIAL_STEP, self._since, due, self.phase.value)]

    def snapshot(self) -> dict[str, object]:
        return {"task": str(self.task), "phase": self.phase.value, "job": f"{self.job:016x}", "linked": self._linked}

    def check(self) -> None:
        if self.phase is MemberPhase.MEMBER:
            assert self.job, "a member without a job"
