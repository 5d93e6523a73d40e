"""The coordinator of a job without servers whose ranks come back: rank 0 at first, and its deputy when that is lost.

A step is committed when every rank has every mean of it and has told its state before it. That word ends backward on
every rank, so no optimizer makes a step before it, and until then every rank has its own gradients and the parameters
of that step. A rank that comes back begins with the step after the committed one, with the state that it told before
it; if it had not told that one yet, it *replays* the committed step: it makes its iteration once more with the state
before, for all that follows from it on this rank alone, and takes the outcome of ``optimizer.step()`` from another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lockstep.protocol import phrases
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.coordinator.server_losses import ServerLosses
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.events import Received
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, ClusterShape, JobId, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import End, Join, LocalState, Member, Resolution, StateBefore, View
from lockstep.protocol.core.placement import Placement


class RankSeats(ServerLosses):
    """Who coordinates and who is the deputy. A rank's share of the means stays with the rank: it has no state."""

    def __init__(self, shape: ClusterShape, placement: Placement | None = None, alive: Iterable[TaskId] = ()) -> None:
        super().__init__(shape, placement or Placement.of_ranks(), alive or shape.worker_ids())
        self._ranks = shape.worker_ids()

    @property
    def homes(self) -> tuple[TaskId, ...]:
        return self._ranks

    @property
    def savers(self) -> tuple[TaskId, ...]:
        return (CHIEF,)


class RankCoordinator(HomedCoordinator):
    """Decides as every coordinator with a deputy does; a lost rank is waited for."""

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
        super().__init__(shape, job, journal, now, rules=rules, beginning=beginning, placement=placement, alive=alive)
        self._settled: Step = INITIAL_STEP
        """The newest version that all ranks have begun to use."""
        self._recovering: set[TaskId] = set()
        """Ranks that are back and have not begun their first step: others have what they need."""

    @staticmethod
    def _make_losses(shape: ClusterShape, placement: Placement | None, alive: Iterable[TaskId]) -> ServerLosses:
        return RankSeats(shape, placement, alive)

    # -- commits --

    def _states_are_there(self, step: Step) -> bool:
        """Each rank's state *before* the step: the one after it does not exist before the step is committed."""
        return step < 0 or all(self.states.has(task, step) for task in self.losses.active())

    def _lacking_states(self) -> list[TaskId]:
        step = self.committed + 1
        if min(self._applied.values()) < step or self._states_are_there(step):
            return []
        return [task for task in self.losses.active() if not self.states.has(task, step)]

    def _commit_if_complete(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        step = self.committed + 1
        if min(self._applied.values()) >= step and self._states_are_there(step):
            self.committed = step
            self._journal.record(now, Happening.COMMITTED, step)
            self.states.forget_before(step)
            effects += self._tell_homes()
        return effects + self._save_if_due(now) + self._end_if_possible(now)

    def _save_if_due(self, now: float) -> list[Effect]:
        """Parameters have the next version once every rank has told its state before it."""
        version = self.committed + 1
        if version <= self._settled or version <= 0:
            return []
        if not all(self.states.has(task, version) for task in self.losses.active()):
            return []
        self._settled = version
        if not self.saving.is_due(version, now, possible=self._can_begin_with(version)):
            return []
        self._begin_saving(now)
        return self._tell_homes()

    def _end_if_possible(self, now: float) -> list[Effect]:
        steps = self._ending
        saves = steps is not None and self.rules.saves_last and self.committed == steps - 1
        if saves and not all(self.states.has(task, self.committed + 1) for task in self.losses.active()):
            return []  # what the last iteration left on each rank is saved too
        return super()._end_if_possible(now)

    def _on_state(self, peer: TaskId, state: LocalState, now: float) -> list[Effect]:
        if state.step > self.committed:
            self._recovering.discard(peer)
        return super()._on_state(peer, state, now)

    # -- losses --

    def _lose_server(self, task: TaskId, reason: Reason, now: float) -> list[Effect]:
        """It is waited for; meanwhile no step can be completed, since its gradients are missing."""
        self._journal.record(now, Happening.LOST, self._steps_seen(), peer=task, cause=reason.text)
        life = self._joined[task].incarnation
        if stuck := self.states.stuck_at(task, self._comes_back_to(task)):
            reason = reason.worded(phrases.cannot_be_taken_back(reason.text, stuck))
            return self._go_back_or_end(task, reason, now)
        self._done.pop(task, None)
        self._ending = None
        self.losses.lose(task, life, reason, now, may_shrink=False)
        if not self.servers.lose(task, life):
            return self._go_back_or_end(task, reason, now)
        return self._new_view(now) + self._tell_of_losses(now)

    def _go_back_or_end(self, task: TaskId, reason: Reason, now: float) -> list[Effect]:
        again = self.rules.returns and not reason.refuses_to_return
        return self._finish(End(False, str(task), self._steps_seen(), reason, again=again), now)

    def _take_back(self, peer: TaskId, join: Join, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self.losses.is_lost(peer):
            # Its next incarnation proves that the former one has ended.
            reason = Reason(Cause.STALE_INCARNATION, phrases.started_again())
            effects = self._on_loss(peer, self._joined[peer].incarnation, reason, now)
            if self.end is not None:
                return effects
        self.servers.come_back(peer)
        if self.committed >= INITIAL_STEP:
            self._recovering.add(peer)
        return effects + super()._take_back(peer, join, now)

    def _on_held(self, event: Received, number: int, now: float) -> list[Effect]:
        """A rank that has yet to get its parameters from another cannot take anybody's place."""
        if not self._awaits_deputy and event.peer in self._recovering:
            return []
        return super()._on_held(event, number, now)

    def _comes_back_to(self, task: TaskId) -> Step:
        """The step before which the state is that its next incarnation begins with."""
        start = self.committed + 1
        return start - 1 if self._replays(task, start) else start

    def _replays(self, task: TaskId, start: Step) -> bool:
        return start > max(0, self.beginning.start) and not self.states.has(task, start)

    def _view(self, task: TaskId, members: tuple[Member, ...]) -> View:
        view = super()._view(task, members)
        return replace(
            view, state=self.states.of(task, self._comes_back_to(task)), replays=self._replays(task, view.start)
        )

    # -- what the deputy holds --

    def _resolution(self) -> Resolution | None:
        decided = super()._resolution()
        if decided is None:
            return None
        step = self._step_of_states(self.committed, self.beginning.start)
        known = [task for task in self.shape.worker_ids() if self.states.has(task, step)]
        states = [StateBefore(str(t), self.states.of(t, step), self.states.stuck_at(t, step)) for t in known]
        return replace(decided, states=tuple(states), start=self.beginning.start)

    @staticmethod
    def _step_of_states(committed: Step, start: Step) -> Step:
        """Before which step the held states are: the committed one, or, before any, the one that the job begins with.
        What is told after a commit counts for the deputy with the next one; a rank that is lost then replays."""
        return max(committed, start)

    @staticmethod
    def _beginning_of(held: Resolution) -> Beginning:
        return Beginning(start=held.start, checkpoint=held.checkpoint)

    def _take_states(self, held: Resolution) -> None:
        step = self._step_of_states(held.step, held.start)
        for state in held.states:
            self.states.note(TaskId.parse(state.task), LocalState(step, state.data, stuck=state.stuck))
