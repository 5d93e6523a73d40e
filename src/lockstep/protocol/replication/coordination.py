"""What a coordinator decides for a job with second homes: the view, what is committed, the end.

It has no memory that its deputy does not hold: ``resume`` makes the same object of the last decision.

::

    FORMING   not every task has entered
    RUNNING   a view is known
    ENDED     the end is decided
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, Incarnation, Role, Step, TaskId, server
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import End, LocalState
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.replication.decisions import HeldDecisions
from lockstep.protocol.replication.replica_events import ReplicaEffect, Say
from lockstep.protocol.replication.replica_messages import DecisionRecord, Stamped, StepCommitted, ViewOf


class CoordinationPhase(StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"


class CoordinationTrigger(StrEnum):
    COMPLETE = "the last task entered"
    TAKE_OVER = "the former coordinator has ended"
    END = "all workers finished, or both homes of something are lost"


COORDINATION_TRANSITIONS: Mapping[tuple[CoordinationPhase, CoordinationTrigger], CoordinationPhase] = MappingProxyType(
    {
        (CoordinationPhase.FORMING, CoordinationTrigger.COMPLETE): CoordinationPhase.RUNNING,
        (CoordinationPhase.FORMING, CoordinationTrigger.TAKE_OVER): CoordinationPhase.RUNNING,
        (CoordinationPhase.RUNNING, CoordinationTrigger.END): CoordinationPhase.ENDED,
    }
)


class Coordination:
    """The decisions of one job."""

    def __init__(self, shape: ClusterShape, *, returns: bool = False, serial: int = 0) -> None:
        """``returns``: there is a checkpoint to go back to if both homes of something are lost."""
        self.shape = shape
        self.phase = CoordinationPhase.FORMING
        self.view = 0
        self.placement = Placement.at_start(shape.servers)
        self.members: dict[TaskId, Incarnation] = {}
        """Of the view, as it was decided."""
        self._present: dict[TaskId, Incarnation] = {}
        """Who would belong to the next view."""
        self.committed: Step = INITIAL_STEP - 1
        self.end: End | None = None
        self.decisions = HeldDecisions(serial)
        self._returns = returns
        self._states: dict[TaskId, dict[Step, bytes]] = {task: {} for task in shape.worker_ids()}
        self._applied: dict[int, Step] = {}
        self._done: dict[TaskId, Step] = {}

    @classmethod
    def resume(
        cls,
        record: DecisionRecord,
        shape: ClusterShape,
        gone: Iterable[tuple[TaskId, Incarnation]],
        *,
        returns: bool = False,
    ) -> tuple[Coordination, list[ReplicaEffect]]:
        """The deputy takes over: ``record`` is what it holds, ``gone`` whose ends are proven."""
        made = cls(shape, returns=returns, serial=record.serial)
        made.phase = advance(COORDINATION_TRANSITIONS, made.phase, CoordinationTrigger.TAKE_OVER)
        made.view, made.placement, made.committed = record.view, record.placement, record.committed
        ended = set(gone)
        made._present = {task: life for task, life in record.members if (task, life) not in ended}
        for task, state in record.states:
            made._states[task][record.committed + 1] = state
        if record.end is not None:
            return made, made._finish(record.end)
        return made, made._place_again(record.placement.coordinator)

    # -- who takes part --

    def on_entering(self, task: TaskId, life: Incarnation) -> list[ReplicaEffect]:
        known = self._present.get(task)
        if self.end is not None or known == life:
            return self.say_again_to(task)
        if self.phase is CoordinationPhase.FORMING:
            self._present[task] = life
            if len(self._present) < len(self.shape.tasks()):
                return []
            self.phase = advance(COORDINATION_TRANSITIONS, self.phase, CoordinationTrigger.COMPLETE)
            return self._new_view()
        if task.role is Role.WORKER:
            self._present[task] = life
            self._done.pop(task, None)
            return self._new_view()
        # Its next incarnation proves that the former one has ended.
        effects = self.on_gone(task, known) if known is not None else []
        if self.phase is CoordinationPhase.ENDED:
            return effects
        self._present[task] = life
        return effects + self._place_again(task)

    def on_gone(self, task: TaskId, life: Incarnation) -> list[ReplicaEffect]:
        """Proof that this incarnation has ended. A worker is waited for; a server's second home takes over."""
        if self._present.get(task) != life:
            return []
        del self._present[task]
        if self.end is not None:
            return self._drop_deputy_if_gone()
        if self.phase is CoordinationPhase.FORMING or task.role is Role.WORKER:
            return []
        return self._place_again(task)

    def _place_again(self, culprit: TaskId) -> list[ReplicaEffect]:
        alive = frozenset(task.index for task in self._present if task.role is Role.SERVER)
        placement = self.placement.after(alive)
        if placement is None:
            reason = Reason(Cause.DEAD, phrases.both_homes_lost(culprit), peer=str(culprit))
            return self._finish(End(False, str(culprit), self.committed + 1, reason, again=self._returns))
        self.placement = placement
        return self._new_view()

    def _new_view(self) -> list[ReplicaEffect]:
        self.view += 1
        self.members = dict(self._present)
        self._applied = dict.fromkeys(self.placement.homes(), self.committed)
        deputy = self.placement.deputy
        life = 0 if deputy is None else self.members[deputy]
        freed = self.decisions.choose(deputy, life, whole=self.placement.coordination.whole)
        return freed + self._decide([Say(task, self._view_for(task)) for task in self.members])

    def _view_for(self, task: TaskId) -> ViewOf:
        start = self.committed + 1
        state = self._states.get(task, {}).get(start, b"")
        return ViewOf(self.view, self.placement, tuple(self.members.items()), self.committed, start, state)

    # -- what is whole --

    def on_whole(self, shard: int, home: TaskId) -> list[ReplicaEffect]:
        homes = self.placement.shards[shard]
        if self.end is not None or homes.whole or homes.home_task != home or homes.second_task is None:
            return []
        self.placement = self.placement.with_whole_shard(shard)
        return self._new_view()

    def on_held(self, deputy: TaskId, life: Incarnation, serial: int) -> list[ReplicaEffect]:
        if self.members.get(deputy) != life:
            return []
        effects, whole = self.decisions.on_held(deputy, serial)
        if not whole or self.end is not None:
            return effects
        self.placement = self.placement.with_whole_deputy()
        return effects + self._new_view()

    # -- steps --

    def on_applied(self, index: int, step: Step) -> list[ReplicaEffect]:
        if index not in self._applied:
            return []
        if step <= self.committed:
            return self.decisions.after_newest([Say(server(index), self._stamped())])
        self._applied[index] = max(self._applied[index], step)
        return self._commit_if_complete()

    def on_state(self, worker: TaskId, state: LocalState) -> list[ReplicaEffect]:
        if state.step > self.committed:
            self._states[worker].setdefault(state.step, state.data)
        return self._commit_if_complete()

    def on_done(self, worker: TaskId, steps: Step) -> list[ReplicaEffect]:
        self._done[worker] = steps
        return self._end_if_possible()

    def _commit_if_complete(self) -> list[ReplicaEffect]:
        """Every home has made the step and its second home holds it; every worker could start after it."""
        step = self.committed + 1
        if self.end is not None or min(self._applied.values()) < step or not self._has_states(step):
            return []
        self.committed = step
        for states in self._states.values():
            for old in [known for known in states if known <= step]:
                del states[old]
        homes = [homes.home_task for homes in self.placement.shards]
        told: list[ReplicaEffect] = [Say(home, self._stamped()) for home in dict.fromkeys(homes)]
        return self._decide(told) + self._end_if_possible()

    def _has_states(self, step: Step) -> bool:
        return step == INITIAL_STEP or all(step + 1 in states for states in self._states.values())

    def _stamped(self) -> Stamped:
        return Stamped(self.view, StepCommitted(self.committed))

    def _end_if_possible(self) -> list[ReplicaEffect]:
        steps = max(self._done.values(), default=0)
        if self.end is not None or len(self._done) < self.shape.workers or self.committed < steps - 1:
            return []
        return self._finish(End(True, "", steps))

    def on_differing(self, home: TaskId, step: Step) -> list[ReplicaEffect]:
        if self.end is not None:
            return []
        reason = Reason(Cause.DRIFTED, phrases.homes_differ(step), peer=str(home))
        return self._finish(End(False, str(home), step, reason, again=self._returns))

    def _finish(self, end: End) -> list[ReplicaEffect]:
        self.phase = advance(COORDINATION_TRANSITIONS, self.phase, CoordinationTrigger.END)
        self.end = end
        freed = self._drop_deputy_if_gone()
        return freed + self._decide([Say(task, end) for task in self._present])

    def _drop_deputy_if_gone(self) -> list[ReplicaEffect]:
        """There is no next view to choose another deputy in; its end is proven, so nothing waits for it."""
        deputy = self.placement.deputy
        is_there = deputy is not None and self._present.get(deputy) == self.members.get(deputy)
        return [] if is_there else self.decisions.choose(None, 0, whole=False)

    def _decide(self, effects: list[ReplicaEffect]) -> list[ReplicaEffect]:
        step = self.committed + 1
        states = tuple((task, states[step]) for task, states in self._states.items() if step in states)
        members = tuple(self.members.items())
        record = DecisionRecord(0, self.view, self.placement, members, self.committed, states, self.end)
        return self.decisions.decide(record, effects)

    def say_again_to(self, task: TaskId) -> list[ReplicaEffect]:
        """The newest view, or the end, and to the deputy the newest decision: they may have been lost with a link."""
        if self.phase is CoordinationPhase.FORMING:
            return []
        said = self._view_for(task) if self.end is None else self.end
        again = self.decisions.say_again() if task == self.placement.deputy else []
        return again + self.decisions.after_newest([Say(task, said)])

    def check(self) -> None:
        if self.phase is not CoordinationPhase.RUNNING:
            return
        assert self.placement.coordination.home_task in self.members, "a coordinator that is no member"
        assert all(homes.home_task in self.members for homes in self.placement.shards), "a home that is no member"
