"""The steps of a running job, as its coordinator keeps them: what is committed, who was lost, what is saved, the end.

``coordinator_machine.py`` adds how the cluster forms, and the door.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol import phrases
from lockstep.protocol.coordinator.calls import CallConflict, Calls
from lockstep.protocol.coordinator.losses import Losses
from lockstep.protocol.coordinator.norms import Norms
from lockstep.protocol.coordinator.recovery import Beginning, LocalStates, RecoveryRules
from lockstep.protocol.coordinator.saving import Saving
from lockstep.protocol.coordinator.server_losses import ServerLosses
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.ids import (
    INITIAL_STEP,
    NOTHING_TO_APPLY,
    ClusterShape,
    Incarnation,
    JobId,
    Step,
    TaskId,
)
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.leaving import Departure, Leavers, Shutdown
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import (
    Applied,
    CallMade,
    Commit,
    Contributors,
    Done,
    End,
    Join,
    Leaving,
    Left,
    LocalState,
    Lost,
    Member,
    MissingTask,
    PartialNorm,
    Roster,
    Seal,
    TotalNorm,
    View,
)
from lockstep.protocol.core.timing import REPEAT_SECONDS


class JobPhase(StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


class JobPhaseTrigger(StrEnum):
    COMPLETE = "the last task joined"
    END = "all workers finished, or a task failed"


JOB_PHASE_TRANSITIONS: Mapping[tuple[JobPhase, JobPhaseTrigger], JobPhase] = MappingProxyType(
    {
        (JobPhase.FORMING, JobPhaseTrigger.COMPLETE): JobPhase.RUNNING,
        (JobPhase.FORMING, JobPhaseTrigger.END): JobPhase.ENDED,
        (JobPhase.RUNNING, JobPhaseTrigger.END): JobPhase.ENDED,
    }
)


class RunningJob:
    """Commits, losses, checkpoints and the end of one job."""

    def __init__(
        self,
        shape: ClusterShape,
        job: JobId,
        journal: Journal,
        now: float,
        *,
        aggregate: int | None = None,
        rules: RecoveryRules | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        """``aggregate``: the first N workers that seal a step make it; None: all of them do."""
        self.rules = (rules or RecoveryRules()).of(shape)
        self.beginning = beginning or Beginning()
        start = self.beginning.start
        self.states = LocalStates(self.beginning, shape.workers)
        self.saving = Saving(self.rules, shape.savers, start, now)
        self.losses = Losses(self.rules, shape)
        self.servers: ServerLosses | None = None
        """Where everything lives, if servers have second homes."""
        self.calls = Calls(keeps=self.rules.takes_back)
        self.norms = Norms()
        self.leavers = Leavers()
        self.shutdown: Shutdown | None = None
        self._number = 0
        self._ending: Step | None = None
        """After how many steps all workers have finished."""
        self._saved_last = False
        self.shape = shape
        self.aggregate = aggregate
        self.dropped: dict[TaskId, int] = {}
        """How many steps were made without each worker (with backup workers)."""
        self._sealed: dict[TaskId, Step] = {}
        self.decision = Contributors(INITIAL_STEP, ())
        """The workers that make the newest decided step (with backup workers)."""
        self.job = job
        self.phase = JobPhase.FORMING
        self.committed: Step = start - 1
        self.end: End | None = None
        self._journal = journal
        self._since = now
        self._joined: dict[TaskId, Join] = {}
        self._applied = dict.fromkeys(shape.homes, start - 1)
        self._applied_since = now
        """Since when every server has applied the step after the last committed one, if all have."""
        self._done: dict[TaskId, Step] = {}
        self._findings: dict[TaskId, MissingTask] = {}
        self._roster_at = now

    @property
    def here(self) -> TaskId:
        """The task that this machine runs on."""
        return self.shape.coordinator

    def _is_member(self, peer: TaskId, incarnation: Incarnation) -> bool:
        join = self._joined.get(peer)
        return join is not None and join.incarnation == incarnation

    def _new_view(self, now: float) -> list[Effect]:
        self._number += 1
        self._journal.record(now, Happening.VIEW)
        if self.servers is not None:
            self._applied = self.servers.applied_before(self.committed)
            if self.saving.change_savers(self.servers.savers, self._number, now):
                self._saved_last = False
        here = [task for task in self.shape.tasks() if task in self._joined]
        there = [task for task in here if not self.losses.is_away(task)]
        members = self._members()
        return [Send(task, self._view(task, members)) for task in there]

    def _members(self) -> tuple[Member, ...]:
        return tuple(
            Member(str(task), self._joined[task].incarnation) for task in self.shape.tasks() if task in self._joined
        )

    def _view(self, task: TaskId, members: tuple[Member, ...]) -> View:
        """The view for this task, which starts with the step after the last committed one."""
        start = max(self.committed + 1, INITIAL_STEP)
        state = self.states.of(task, start) if task in self.shape.worker_ids() else b""
        view = View(self.job, self._number, members, start, state, self.beginning.checkpoint)
        if self.servers is None:
            return view
        return replace(view, shards=self.servers.placement.shards, decisions=self.servers.decisions)

    # -- running --

    def _on_applied(self, peer: TaskId, message: Applied, now: float) -> list[Effect]:
        if peer not in self._applied or (self.servers is not None and message.view != self._number):
            return []
        if message.step <= self.committed:
            known: list[Effect] = [Send(peer, self._commit_for(peer))]
            return [*known, Send(peer, self.decision)] if self.decision.step > self.committed else known
        self._applied[peer] = max(self._applied[peer], message.step)
        self._applied_since = now
        return self._decide_norm(now) + self._commit_if_complete(now)

    def _on_state(self, peer: TaskId, state: LocalState, now: float) -> list[Effect]:
        if peer not in self.shape.worker_ids() or state.step <= self.committed or not self.states.note(peer, state):
            return []
        return self._commit_if_complete(now)

    def _commit_if_complete(self, now: float) -> list[Effect]:
        """A step is committed when every home has applied it and every worker could be restarted after it."""
        complete = min(self._applied.values())
        effects: list[Effect] = []
        while self.committed < complete and self._states_are_there(self.committed + 1):
            # Servers without a bucket have "applied" them all.
            self.committed = complete if complete == NOTHING_TO_APPLY else self.committed + 1
            self._journal.record(now, Happening.COMMITTED, self.committed)
            self.states.forget_before(self.committed + 1)
            self.norms.forget_before(self.committed + 1)
            effects += self._take_back_the_waiting(now)
            if self.saving.is_due(self.committed + 1, now, possible=self._can_begin_with(self.committed + 1)):
                self._begin_saving(now)
            effects += self._tell_homes()
        return effects + self._end_if_possible(now)

    def _states_are_there(self, step: Step) -> bool:
        if not self.rules.keeps_states or step == INITIAL_STEP or self.aggregate is not None:
            return True
        return all(self.states.has(task, step + 1) for task in self.losses.active())

    def _lacking_states(self) -> list[TaskId]:
        """The workers whose state the next commit waits for, once every server has applied that step."""
        step = self.committed + 1
        if min(self._applied.values()) < step or self._states_are_there(step):
            return []
        return [task for task in self.losses.active() if not self.states.has(task, step + 1)]

    def _can_begin_with(self, step: Step) -> bool:
        """Whether a job could start with the workers' states before ``step``."""
        return not any(self.states.stuck_at(task, step) for task in self.losses.active())

    def _begin_saving(self, now: float) -> None:
        version = self.committed + 1
        states = tuple((task.index, self.states.of(task, version)) for task in self.shape.worker_ids())
        self.saving.begin(version, states, now)

    def _tell_homes(self) -> list[Effect]:
        return [Send(task, self._commit_for(task)) for task in self._homes()]

    def _homes(self) -> tuple[TaskId, ...]:
        return self.shape.homes if self.servers is None else self.servers.homes

    def _commit_for(self, server: TaskId) -> Commit:
        save = self.saving.version == self.committed + 1 and self.saving.lacks(server)
        return Commit(self.committed, save, self.losses.change, self.losses.contributors())

    # -- the norm of a step's mean --

    def _on_partial_norm(self, peer: TaskId, part: PartialNorm, now: float) -> list[Effect]:
        known = self.norms.answer(part.step, part.number)
        if known is not None:
            return [Send(peer, known)]
        if part.step > self.committed:
            self.norms.note(peer, part, now)
        return self._decide_norm(now)

    def _decide_norm(self, now: float) -> list[Effect]:
        total = self.norms.decide(self._measuring_homes(), self._norm_change)
        if total is None:
            return []
        self._journal.record(now, Happening.MEASURED, total.step)
        told = [*self._homes(), *(task for task in self.losses.active() if not self.losses.is_away(task))]
        return [Send(task, total) for task in told]

    @property
    def _norm_change(self) -> int:
        """Parts that were measured before a change of contributors, or in an earlier view, do not count."""
        return self.losses.change if self.servers is None else self._number

    def _measuring_homes(self) -> list[TaskId]:
        """Without those that hold no bucket."""
        return [home for home, applied in self._applied.items() if applied != NOTHING_TO_APPLY]

    def _on_seal(self, peer: TaskId, seal: Seal, now: float) -> list[Effect]:
        """A worker that asks for a norm which is known, or does not hear it, is told. And where not all workers make
        a step: the first ones that seal it do. This is decided once, for all servers."""
        known: TotalNorm | None = self.norms.answer(seal.step, seal.number) if seal.asks else None
        if known is not None:
            return [Send(peer, known)]
        if self.aggregate is None or seal.step <= self.decision.step:
            return []
        self._sealed[peer] = seal.step
        here = sorted(task.index for task, step in self._sealed.items() if step == seal.step)
        if len(here) < self.aggregate:
            return []
        self.decision = Contributors(seal.step, tuple(here))
        for task in self.shape.worker_ids():
            if task.index not in here:
                self.dropped[task] = self.dropped.get(task, 0) + 1
                self._journal.record(now, Happening.DROPPED, seal.step, peer=task, cause="not among the first to seal")
        return [Send(task, self.decision) for task in self._homes()]

    def _on_done(self, peer: TaskId, message: Done, now: float) -> list[Effect]:
        self._done[peer] = message.steps
        if any(task not in self._done for task in self.losses.active()):
            return self._end_if_call_is_missed(now)
        self._ending = max(self._done.values())
        return self._end_if_possible(now)

    def _on_call(self, peer: TaskId, incarnation: Incarnation, made: CallMade, now: float) -> list[Effect]:
        """A worker has come to a call that all workers make."""
        found = self.calls.on_made((peer, incarnation), made, self.losses.active(), self.committed, now)
        if isinstance(found, CallConflict):
            return self._finish_badly(found.culprit, self._steps_seen(), found.reason, now)
        return found or self._end_if_call_is_missed(now)

    def _end_if_call_is_missed(self, now: float) -> list[Effect]:
        """A worker that has finished does not come to the call that others are in."""
        missed = self.calls.missed_by(self._done, self.losses.active())
        return [] if missed is None else self._finish_badly(missed.culprit, self._steps_seen(), missed.reason, now)

    def _end_if_possible(self, now: float) -> list[Effect]:
        """All workers have finished. What is being saved is written first, and the last version too."""
        steps = self._ending
        if steps is None or self.end is not None or self.saving.version is not None:
            return []
        if self.rules.saves_last and not self._saved_last:
            if self.committed < steps - 1:
                return []
            self._saved_last = True
            if self.saving.last != steps and self.committed == steps - 1:
                self._begin_saving(now)
                return self._tell_homes()
        return self._finish(End(True, "", steps), now)

    # -- losses: a worker may come back; the loss of a server takes all tasks back to a checkpoint --

    def _on_lost(self, lost: Lost, now: float) -> list[Effect]:
        task = TaskId.parse(lost.task)
        if not lost.lives:
            return self._on_loss(task, lost.incarnation, lost.reason, now)
        known = self.losses.found_again(task, lost.incarnation)
        return self._tell_of_losses(now) if known else []

    def _on_loss(self, task: TaskId, incarnation: Incarnation, reason: Reason, now: float) -> list[Effect]:
        known = self._joined.get(task)
        if self.end is not None or (incarnation and known is not None and known.incarnation != incarnation):
            return []
        if self.losses.is_lost(task) or self._is_not_missed(task):
            return []
        if self.shutdown is not None:
            return self._finish_shutdown(now)  # the step can no longer be finished
        if self.rules.survives(task, self.shape):
            if self.phase is JobPhase.FORMING:
                self._joined.pop(task, None)
                return []
            if self.servers is not None and task in self.shape.homes:
                return self._lose_server(task, reason, now)
            if task in self.shape.homes:
                again = not reason.refuses_to_return
                return self._finish(End(False, str(task), self._steps_seen(), reason, again=again), now)
            return self._lose_worker(task, reason, now)
        return self._finish_badly(task, self._steps_seen(), reason, now)

    def _lose_server(self, task: TaskId, reason: Reason, now: float) -> list[Effect]:
        """Its second home takes over, in a new view; if that one is lost too, the checkpoint, or the end."""
        assert self.servers is not None
        if task not in self._joined:
            return []  # another task has told of it
        self._journal.record(now, Happening.LOST, self._steps_seen(), peer=task, cause=reason.text)
        life = self._joined.pop(task).incarnation
        if self.servers.lose(task, life):
            return self._new_view(now) + self._end_if_possible(now)
        again = self.rules.returns and not reason.refuses_to_return
        reason = reason.worded(phrases.both_homes_lost(task))
        return self._finish(End(False, str(task), self._steps_seen(), reason, again=again), now)

    def _is_not_missed(self, task: TaskId) -> bool:
        """It has done all its work. Where it holds buckets too, the others may still need its last ones, and the last
        step may have to be committed, to be saved."""
        if task not in self._done:
            return False
        if task not in self.shape.homes:
            return True
        return self._ending is not None and (not self.rules.saves_last or self.committed >= self._ending - 1)

    def _lose_worker(self, task: TaskId, reason: Reason, now: float) -> list[Effect]:
        self._journal.record(now, Happening.LOST, self._steps_seen(), peer=task, cause=reason.text)
        start = max(self.committed + 1, INITIAL_STEP)
        if stuck := self.states.stuck_at(task, start):
            reason = reason.worded(phrases.cannot_be_taken_back(reason.text, stuck))
            return self._finish_badly(task, self._steps_seen(), reason, now)
        self.states.forget_stuck_after(task, start)
        begun = self.committed >= INITIAL_STEP
        changed = self.losses.lose(task, self._joined[task].incarnation, reason, now, may_shrink=begun)
        effects = self._tell_of_losses(now)
        if not changed:
            return effects
        effects += [*self._tell_homes(), *self._commit_if_complete(now)]
        effects += self.calls.complete_if_all(self.losses.active(), self.committed)
        self._ending = max(self._done.values()) if self._done and not self._unfinished() else None
        return effects + self._end_if_possible(now)

    def _unfinished(self) -> list[TaskId]:
        return [task for task in self.losses.active() if task not in self._done]

    def _tell_of_losses(self, now: float) -> list[Effect]:
        self._roster_at = now + REPEAT_SECONDS
        roster = Roster(self.losses.missing(now))
        return [Send(task, roster) for task in self.shape.tasks() if not self.losses.is_lost(task)]

    def _take_back(self, peer: TaskId, join: Join, now: float) -> list[Effect]:
        """Another incarnation of a worker is here. It takes part at once, or after this step if the others went on."""
        former = self._joined[peer].incarnation
        self._joined[peer] = join
        self._journal.record(now, Happening.JOINED, peer=peer)
        if not self.losses.come_back(peer, former):
            return []
        self._await_again(peer)
        return [*self._new_view(now), *self._tell_of_losses(now)]

    def _await_again(self, worker: TaskId) -> None:
        """It may have finished in its former incarnation; this one lacks the last version until it has it, and says
        so then."""
        if self._done.pop(worker, None) is not None:
            self._ending = None

    def _take_back_the_waiting(self, now: float) -> list[Effect]:
        """Between two steps: workers that came back take part in the next one."""
        back = self.losses.take_in()
        for task in back:
            self.states.set(task, self.committed + 1, self.states.newest_of(task))
        return self._new_view(now) if back else []

    # -- tasks that leave because of a signal --

    def _on_leaving(self, peer: TaskId, incarnation: Incarnation, said: Leaving, now: float) -> list[Effect]:
        departure = Departure.of(said.signal)
        if departure is None:
            return []
        if not self._is_member(peer, incarnation) or self.leavers.is_gone(peer, incarnation):
            return [Send(peer, Left(str(peer), departure))]
        if self.end is not None:
            return [Send(peer, self.end)]
        if departure.ends_the_job:
            reason = Reason(Cause.STOPPED, phrases.received(departure))
            return self._finish(End(False, str(peer), self._steps_seen(), reason, departure=departure), now)
        if not self.leavers.note(peer, incarnation, now):
            return []
        told: list[Effect] = [Send(task, Left(str(peer), departure)) for task in self._present() if task != peer]
        if peer == self.here:
            return told + self._shut_down(now)
        return told + self._let_go([(peer, incarnation)], now) if self.phase is JobPhase.FORMING else told

    def _let_go(self, leavers: list[tuple[TaskId, Incarnation]], now: float) -> list[Effect]:
        """Only these tasks end, not the whole job: they are lost."""
        effects: list[Effect] = []
        for task, incarnation in leavers:
            self.leavers.dismiss(task, incarnation)
            effects.append(Send(task, Left(str(task), Departure.SIGTERM)))
            reason = Reason(Cause.DEAD, phrases.left(Departure.SIGTERM))
            effects += self._on_loss(task, incarnation, reason, now)
        return effects

    def _shut_down(self, now: float) -> list[Effect]:
        self.shutdown = Shutdown(self.committed + 1, now + self.rules.grace_seconds)
        if self.phase is JobPhase.FORMING or not self.rules.saves or self.losses.is_waiting:
            return self._finish_shutdown(now)
        self.saving.owe(now)
        return self._end_if_saved(now)

    def _end_if_saved(self, now: float) -> list[Effect]:
        if self.shutdown is None or self.end is not None or self.saving.version is not None:
            return []
        return self._finish_shutdown(now) if self.saving.last >= self.shutdown.version else []

    def _finish_shutdown(self, now: float) -> list[Effect]:
        assert self.shutdown is not None
        text = phrases.ended_the_job(Departure.SIGTERM)
        if self.rules.saves and self.saving.last >= max(0, self.shutdown.version):
            text = phrases.saved_before_the_end(text, self.saving.last)
        elif self.rules.saves:
            text = phrases.not_saved_before_the_end(text)
        reason, coordinator = Reason(Cause.STOPPED, text), str(self.here)
        return self._finish(End(False, coordinator, self._steps_seen(), reason, departure=Departure.SIGTERM), now)

    def _on_tick_of_leavers(self, now: float) -> list[Effect]:
        if self.shutdown is not None:
            over = now >= self.shutdown.deadline
            return self._finish_shutdown(now) if over else []
        return self._let_go(self.leavers.overdue(now), now)

    def _deadline_of_leavers(self) -> float | None:
        return self.leavers.deadline() if self.shutdown is None else self.shutdown.deadline

    # -- the end --

    def _finish_badly(self, culprit: TaskId, step: Step, reason: Reason, now: float) -> list[Effect]:
        if self.end is not None:
            return []
        return self._finish(End(False, str(culprit), step, reason), now)

    def _finish(self, end: End, now: float) -> list[Effect]:
        self.phase = advance(JOB_PHASE_TRANSITIONS, self.phase, JobPhaseTrigger.END)
        self.end = end
        self._journal.record(now, Happening.ENDED, end.step, cause=end.reason.text)
        return [Send(task, end) for task in self._present()]

    def _present(self) -> list[TaskId]:
        """The tasks that joined, except those that were let go."""
        joined = self._joined
        return [t for t in self.shape.tasks() if t in joined and not self.leavers.is_gone(t, joined[t].incarnation)]

    def _steps_seen(self) -> Step:
        return self.committed + 1
