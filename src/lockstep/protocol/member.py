"""The machine for a task's membership: it joins, receives the view, and leaves when the job ends.

::

    OUTSIDE   no link to the coordinator yet
    JOINING   the join was sent; it is repeated until the view comes
    MEMBER    the view has come
    ENDED     the job is over for this task
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    Member,
    MissingTask,
    Refused,
    Resolution,
    Roster,
    View,
)
from lockstep.protocol.core.placement import Homes
from lockstep.protocol.core.timing import HEADLESS_SECONDS, REPEAT_SECONDS, STALE_ROSTER_SECONDS
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
        deputy: TaskId | None = None,
    ) -> None:
        """``deadline``: when the cluster must be complete (``--startup_timeout`` from the start). ``returns``: a job
        that loses a task that holds buckets, even the coordinator's, starts again from its newest checkpoint.
        ``deputy``: the server that takes the coordinator's place at first, where servers have second homes."""
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
        self._links: dict[TaskId, Incarnation] = {task: join.incarnation}
        """The incarnations that this task is linked with; it needs no link to itself."""
        self._deputy = deputy
        """The server that takes the coordinator's place if it ends."""
        self._headless: tuple[float, PeerGone] | None = None
        """The coordinator has ended: until when its deputy must have taken its place, and how it ended."""
        self._told_view = 0
        """The newest view that this task was told of and is not in."""
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
        if isinstance(event, LinkUp):
            self._links[event.peer] = event.incarnation
        elif isinstance(event, LinkLost):
            self._links.pop(event.peer, None)
        match event:
            case LinkUp(peer=peer) if peer == self.coordinator:
                return self._on_link_up(event, now)
            case LinkUp() if event.peer in self._losses:
                return self._on_found_again(event)
            case LinkLost(peer=peer) if peer == self.coordinator:
                return self._on_link_lost(event, now)
            case PeerGone():
                return [] if self._is_former_coordinator(event) else self._on_peer_gone(event, now)
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
        is_stale = self._returns if self._deputy is None else bool(self._view)
        if is_stale and known not in (0, event.incarnation):
            # Before its view came, this task may have worked for the former coordinator's job: its memory is stale.
            # Where servers have second homes it has not, and a cluster that forms waits for its next incarnation.
            reason = Reason(Cause.STALE_INCARNATION, phrases.started_again())
            return self._on_peer_gone(PeerGone(self.coordinator, reason, known), now)
        self._linked = True
        self._headless = None  # while the cluster forms, its coordinator may be started again
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

    def _is_former_coordinator(self, event: PeerGone) -> bool:
        """Its end was noticed late: this task is linked with the next one already, which leads the job that it is in,
        if it is in one."""
        is_it = event.peer == self.coordinator and event.incarnation not in (0, self._coordinator_life)
        return is_it and self._linked and self._lives.get(event.peer, self._coordinator_life) == self._coordinator_life

    def _on_peer_gone(self, event: PeerGone, now: float) -> list[Effect]:
        """Notify the coordinator. If it is the one that is gone, no task is left to decide, and the job ends here."""
        may_come_back = not self._view or self._deputy not in self._losses
        if event.peer == self.coordinator and self._deputy is not None and may_come_back:
            if self._headless is None:
                self._headless = (now + HEADLESS_SECONDS, event)
                self._repeat_at = now + REPEAT_SECONDS
            return []
        if self._headless is not None and event.peer == self._deputy and self._view:
            event = self._headless[1]  # nobody is left that holds the decisions
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

    def _successor(self, homes: Homes) -> TaskId | None:
        """Who takes the coordinator's place. A rank that is to hold the decisions may hold them although this task has
        not heard that yet; the rank itself knows."""
        heard = homes.whole or (homes.ranks and homes.second_task != self.task)
        return homes.second_task if heard else None

    def follow(self, peer: TaskId, life: Incarnation, view: View) -> None:
        """The deputy has taken the coordinator's place, if that is who speaks here: its word counts from now on."""
        its = bool(view.decisions) and view.decisions[0].home_task == peer and self.is_in(view)
        if peer != self._deputy or not its or self._lives.get(peer, life) != life or view.number <= self._view:
            return
        self.coordinator, self._headless, self._deputy = peer, None, None
        self._linked, self._coordinator_life = peer in self._links, self._links.get(peer, 0)
        if self.phase is MemberPhase.OUTSIDE and self._linked:
            self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.LINK_UP)
        self._repeat_at = 0.0  # what it has not heard is said to it at once

    def is_in(self, view: View) -> bool:
        """Whether a view with second homes has this incarnation: it may have been decided before, and told late."""
        return not view.decisions or Member(str(self.task), self._join.incarnation) in view.members

    def turn_to(self, coordinator: TaskId, view: int, now: float) -> list[Effect]:
        """This task is no member, and another server coordinates than it believed; empty if that is no news."""
        if self.phase is MemberPhase.MEMBER and view > self._view:
            # Everybody took this task for dead, and went on without it: nothing that it still does may count.
            reason = Reason(Cause.STALE_INCARNATION, phrases.was_replaced(coordinator))
            return self._end(False, str(self.task), reason, now, alone=True)
        outside = self.phase in (MemberPhase.OUTSIDE, MemberPhase.JOINING)
        if not outside or coordinator in (self.coordinator, self.task) or coordinator not in self._links:
            return []
        if view < self._told_view:
            return []  # a server that was replaced and does not know it
        self._told_view = view
        self.coordinator, self._headless, self._linked = coordinator, None, True
        self._coordinator_life = self._links[coordinator]
        self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.LINK_UP)
        return self._statements(now)

    def strangers(self, is_member: Callable[[TaskId, Incarnation], bool]) -> list[TaskId]:
        """The tasks that this one is linked with and that are no members."""
        return [peer for peer, life in self._links.items() if not is_member(peer, life)]

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
            case Resolution(decisions=(homes,)):
                # What a deputy holds tells it who it is, before its view has come.
                self._deputy = homes.second_task if homes.whole else None
                return []
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
        self._deputy = next((self._successor(homes) for homes in view.decisions), None)
        for peer in [p for p, lost in self._losses.items() if self._lives.get(p) != lost.incarnation]:
            del self._losses[peer]
        self._journal.record(now, Happening.VIEW)
        if self.phase is MemberPhase.MEMBER:
            has_replica = all(homes.whole for homes in (*view.shards, *view.decisions))
            return [ViewChanged(view.members, has_replica)]
        self.phase = advance(MEMBER_PHASE_TRANSITIONS, self.phase, MemberPhaseTrigger.VIEW)
        self.job = view.job
        late = view.number > 1
        return [BecameMember(view.job, view.members, view.start, view.state, view.checkpoint, view.replays, late)]

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
        if self._headless is not None and now >= self._headless[0]:
            gone = self._headless[1]
            again = self._returns and not gone.reason.refuses_to_return
            return self._end(False, str(gone.peer), gone.reason, now, again=again)
        if self._headless is not None and self._deputy is not None and now >= self._repeat_at:
            # Its view may have come before this task knew that it is the deputy's.
            self._repeat_at = now + REPEAT_SECONDS
            return [Send(self._deputy, self._join)]
        if self._linked and now >= self._repeat_at:
            return self._statements(now)
        return []

    def _give_up(self, now: float) -> list[Effect]:
        waited = now - self._since
        if self._headless is not None:
            culprit, reason = str(self._headless[1].peer), self._headless[1].reason
        elif self.phase is MemberPhase.OUTSIDE:
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
                return min([self._deadline, *self._headless_deadlines()])
            case MemberPhase.JOINING:
                return min([self._repeat_at, self._deadline, *self._headless_deadlines()])
            case MemberPhase.MEMBER:
                statements = (self._done, self._failed, self._departure)
                speaking = bool(self._losses) or any(one is not None for one in statements)
                due = [self._repeat_at] if speaking and self._linked else []
                return min([*due, *self._headless_deadlines()], default=None)

    def _headless_deadlines(self) -> list[float]:
        return [] if self._headless is None else [self._headless[0], self._repeat_at]

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
