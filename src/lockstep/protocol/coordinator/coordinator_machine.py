"""The machine that decides what must be decided once: the job id, the view, when a step is committed, the end.

It runs on server 0 (on worker 0 if there is no server)::

    FORMING   not every task has joined
    RUNNING   the view is known: these incarnations are the members
    ENDED     the job is over, well or with the first real error; any task that still sends receives the end

A worker that is lost while the job runs may come back as another incarnation (``losses.py``, ``running_job.py``). It
starts with the step after the last committed one, whose version every server still has. For this, a step is committed
only when every worker has also sent the small local state that it takes into the next one.
"""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.coordinator.running_job import JOB_PHASE_TRANSITIONS, JobPhase, JobPhaseTrigger, RunningJob
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import (
    Broken,
    CheckpointWritten,
    Event,
    LinkLost,
    LinkUp,
    PeerGone,
    Received,
    Searched,
    Tick,
)
from lockstep.protocol.core.ids import INITIAL_STEP, Role, TaskId
from lockstep.protocol.core.journal import Happening
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import (
    Applied,
    CallMade,
    Commit,
    Done,
    Failed,
    Join,
    Leaving,
    LocalState,
    Lost,
    MissingTask,
    PartialNorm,
    Refused,
    Roster,
    Saved,
    Seal,
)
from lockstep.protocol.core.setting_names import concerns
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind

__all__ = ["JOB_PHASE_TRANSITIONS", "CoordinatorMachine", "JobPhase", "JobPhaseTrigger"]


class CoordinatorMachine(RunningJob):
    """Decides membership, commits and the end of one job."""

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received():
                return self._on_received(event, now)
            case PeerGone():
                return self._on_loss(event.peer, event.incarnation, event.reason, now)
            case CheckpointWritten():
                self.saving.on_written(event.version, event.problem, now)
                return self._end_if_possible(now) or self._end_if_saved(now)
            case Broken():
                return self._finish_badly(event.culprit, event.step, event.reason, now)
            case Searched(findings=findings):
                self._findings = {TaskId.parse(finding.task): finding for finding in findings}
                return []
            case LinkUp():
                return self._on_link_up(event)
            case LinkLost():
                return self._on_link_lost(event, now)
            case Tick():
                return self._on_tick(now)
            case _:
                return []

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        message = event.message
        if isinstance(message, Join):
            return self._on_join(event.peer, message, now)
        if isinstance(message, Leaving):
            return self._on_leaving(event.peer, event.incarnation, message, now)
        if not self._is_member(event.peer, event.incarnation):
            return []
        if self.end is not None and isinstance(message, (Applied, CallMade, Done, Failed)):
            return [Send(event.peer, self.end)]
        match message:
            case Applied():
                return self._on_applied(event.peer, message, now)
            case Done():
                return self._on_done(event.peer, message, now)
            case CallMade():
                return self._on_call(event.peer, event.incarnation, message, now)
            case LocalState():
                return self._on_state(event.peer, message, now)
            case Saved():
                written = self.saving.on_saved(event.peer, message, now)
                return [] if written is None else [written]
            case Lost():
                return self._on_lost(message, now)
            case PartialNorm():
                return self._on_partial_norm(event.peer, message, now)
            case Seal():
                return self._on_seal(event.peer, message, now)
            case Failed():
                culprit = TaskId.parse(message.culprit) if message.culprit else event.peer
                return self._finish_badly(culprit, message.step, message.reason, now)
            case _:
                return []

    # -- forming --

    def _on_join(self, peer: TaskId, join: Join, now: float) -> list[Effect]:
        if self.end is not None:
            return [Send(peer, self.end)]
        known = self._joined.get(peer)
        if known is not None and known.incarnation == join.incarnation:
            waits = self.phase is not JobPhase.RUNNING or self.losses.is_away(peer)
            return [] if waits else [Send(peer, self._view(peer, self._members()))]
        refusal = self._why_refused(peer, join)
        if refusal is not None:
            return [Send(peer, Refused(refusal))]
        difference = self._first_different_setting(peer, join)
        if self.phase is JobPhase.RUNNING:
            return [Send(peer, Refused(difference))] if difference is not None else self._take_back(peer, join, now)
        self._joined[peer] = join
        self._journal.record(now, Happening.JOINED, peer=peer)
        if difference is not None:
            return self._finish_badly(peer, INITIAL_STEP, difference, now)
        if len(self._joined) < len(self.shape.tasks()):
            return []
        self.phase = advance(JOB_PHASE_TRANSITIONS, self.phase, JobPhaseTrigger.COMPLETE)
        return self._new_view(now)

    def _why_refused(self, peer: TaskId, join: Join) -> Reason | None:
        known = self._joined.get(peer)
        if known is None or (self.phase is JobPhase.RUNNING and self.losses.may_come_back(peer, join.incarnation)):
            return None
        if self.phase is JobPhase.FORMING:
            text = phrases.index_taken(peer, known, join)
            return Reason(Cause.DUPLICATE_TASK, text, host=known.host, pid=known.pid)
        text = phrases.job_runs_already(peer, known)
        return Reason(Cause.LEFTOVER_SERVER, text, host=known.host, pid=known.pid)

    def _first_different_setting(self, peer: TaskId, join: Join) -> Reason | None:
        """Compared with the task that joined first and, for what concerns some only, with the first of each role."""
        theirs = {s.name: s.value for s in join.settings}
        firsts = [next((task for task in self._joined if task.role is role), None) for role in Role]
        for reference in filter(None, (next(iter(self._joined), None), *firsts)):
            ours = {s.name: s.value for s in self._joined[reference].settings}
            both = [name for name in ours.keys() | theirs.keys() if concerns(name, peer) and concerns(name, reference)]
            for name in sorted(both):
                if ours.get(name) != theirs.get(name):
                    text = phrases.setting_differs(name, join.task, theirs.get(name), reference, ours.get(name))
                    return Reason(Cause.MISMATCH, text, peer=str(reference))
        return None

    def _on_link_up(self, event: LinkUp) -> list[Effect]:
        if not self._is_member(event.peer, event.incarnation):
            return []
        # A server sends nothing at the end and would never ask: the message may have been lost with its former link.
        if self.end is not None:
            return [Send(event.peer, self.end)]
        changed = self._number > 1 and not self.losses.is_away(event.peer)
        return [Send(event.peer, self._view(event.peer, self._members()))] if changed else []

    def _on_link_lost(self, event: LinkLost, now: float) -> list[Effect]:
        # Before the view is fixed a task may come and go; afterwards only proof of its end counts.
        if self.phase is JobPhase.FORMING and event.peer in self._joined:
            del self._joined[event.peer]
            self._journal.record(now, Happening.LINK_LOST, peer=event.peer, cause=event.reason)
        return []

    def missing(self) -> tuple[TaskId, ...]:
        """The tasks that have not joined."""
        return tuple(task for task in self.shape.tasks() if task not in self._joined)

    def roster(self, now: float) -> Roster:
        """Who is missing, with what was found at its address."""
        return Roster(tuple(self._finding(task, now) for task in self.missing()))

    def _finding(self, task: TaskId, now: float) -> MissingTask:
        # The address gets a placeholder: tasks that were lost have none, and are reported differently.
        blank = MissingTask(str(task), phrases.an_address(), phrases.not_looked_for(), now - self._since, 0)
        return self._findings.get(task, blank)

    # -- time, and what others may ask --

    def _on_tick(self, now: float) -> list[Effect]:
        match self.phase:
            case JobPhase.FORMING if now >= self._roster_at:
                self._roster_at = now + REPEAT_SECONDS
                roster = self.roster(now)
                return [Send(task, roster) for task in self._joined]
            case JobPhase.RUNNING:
                return self._on_tick_while_running(now)
            case _:
                return []

    def _on_tick_while_running(self, now: float) -> list[Effect]:
        effects = self._on_tick_of_leavers(now)
        if self.end is not None:
            return effects
        late = self.losses.overdue(now)
        if late is not None:
            task, loss = late
            text = phrases.did_not_come_back(loss.reason.text, self.rules.rejoin_seconds)
            return effects + self._finish_badly(task, self._steps_seen(), loss.reason.worded(text), now)
        if self.losses.is_waiting and now >= self._roster_at:
            effects += self._tell_of_losses(now)
        if self.saving.repeat_at is not None and now >= self.saving.repeat_at:
            self.saving.repeat_at = now + REPEAT_SECONDS
            assert self.saving.version is not None
            ask = Commit(self.saving.version - 1, True, self.losses.change, self.losses.contributors())
            effects += [Send(task, ask) for task in self.saving.missing()]
        return effects

    def next_deadline(self) -> float | None:
        match self.phase:
            case JobPhase.FORMING:
                return self._roster_at
            case JobPhase.RUNNING:
                times = (self.saving.repeat_at, self.losses.deadline(), self._deadline_of_leavers())
                due = [at for at in times if at is not None]
                return min([*due, self._roster_at] if self.losses.is_waiting else due, default=None)
            case JobPhase.ENDED:
                return None

    def waits(self) -> list[Wait]:
        here = self.here
        if self.phase is JobPhase.FORMING:
            return [
                Wait(
                    here,
                    task,
                    WaitKind.JOINING,
                    INITIAL_STEP,
                    self._since,
                    self._roster_at,
                    self._finding(task, 0).finding,
                )
                for task in self.missing()
            ]
        if self.phase is not JobPhase.RUNNING:
            return []
        shard, due = phrases.shard_of(self.saving.version), self.saving.repeat_at or 0.0
        step = self._steps_seen()
        found = [
            Wait(here, task, WaitKind.SHARD, step, self.saving.since, due, "saving", detail=shard)
            for task in self.saving.missing()
        ]
        since, due = self._applied_since, self._applied_since + REPEAT_SECONDS
        found += [
            Wait(here, task, WaitKind.STATE, step, since, due, phrases.applied_everywhere())
            for task in self._lacking_states()
            if not self.losses.is_away(task)
        ]
        found += self.calls.waits(here, self.losses.active(), step)
        since, state = self.norms.since, phrases.norm_measured_elsewhere()
        found += [
            Wait(here, task, WaitKind.NORM, self.norms.step, since, since + REPEAT_SECONDS, state)
            for task in self.norms.missing(self._measuring_homes(), self._norm_change)
        ]
        return found + self.losses.waits(here, step)

    def snapshot(self) -> dict[str, object]:
        return {
            "job": f"{self.job:016x}",
            "phase": self.phase.value,
            "committed": self.committed,
            "joined": [str(task) for task in self._joined],
            "missing": [str(task) for task in self.missing()],
            "done": {str(task): steps for task, steps in self._done.items()},
            "lost": {str(task): loss.reason.text for task, loss in self.losses.lost.items()},
            "saved": self.saving.last,
            "saving": self.saving.version,
            "steps_without": {str(task): count for task, count in self.dropped.items()},
            "end": None
            if self.end is None
            else {"ok": self.end.ok, "culprit": self.end.culprit, "reason": self.end.reason.text},
        }

    def check(self) -> None:
        self.calls.check()
        assert self.committed <= min(self._applied.values(), default=self.committed), "committed before applied"
        if self.phase is JobPhase.RUNNING:
            assert self.servers is not None or not self.missing(), "running without a task"
