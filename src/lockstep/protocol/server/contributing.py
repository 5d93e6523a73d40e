"""Who makes a step: all workers, all but those that are lost, or (with backup workers) those that were first."""

from __future__ import annotations

from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, ClusterShape, Step, TaskId, worker
from lockstep.protocol.core.messages import Commit, Contributors


class Contributing:
    """A server's record of the contributors that the coordinator has decided."""

    def __init__(self, shape: ClusterShape, aggregate: int | None) -> None:
        """``aggregate``: how many workers make a step, if not all."""
        self.everybody = shape.worker_ids()
        """All workers, minus lost ones where the job continues without them."""
        self._all = frozenset(self.everybody)
        self._aggregate = aggregate
        self._change = 0
        """The number of the last change of that."""
        self._fixed: dict[Step, tuple[TaskId, ...]] = {}
        """Who contributes, where the coordinator has decided it for one step (with backup workers)."""

    def to(self, step: Step) -> tuple[TaskId, ...]:
        """The workers whose gradients may make this step, in the order of reduction."""
        return (CHIEF,) if step == INITIAL_STEP else self._fixed.get(step, self.everybody)

    def includes(self, task: TaskId, step: Step) -> bool:
        """Whether ``task`` is one of them; asked for every arrival, so it does not walk through all workers."""
        if step == INITIAL_STEP or step in self._fixed:
            return task in self.to(step)
        return task in self._all

    def is_decided(self, step: Step) -> bool:
        return self._aggregate is None or step == INITIAL_STEP or step in self._fixed

    def fix(self, decision: Contributors) -> tuple[TaskId, ...]:
        """The first workers that sealed a step make it; empty: this was known."""
        if decision.step in self._fixed:
            return ()
        self._fixed[decision.step] = tuple(worker(index) for index in decision.workers)
        return self._fixed[decision.step]

    def forget(self, step: Step) -> None:
        self._fixed.pop(step, None)

    def change(self, commit: Commit) -> tuple[set[TaskId], set[TaskId]]:
        """The job continues without a lost worker, or takes one back: who is gone, and who is new."""
        if commit.change <= self._change:
            return set(), set()
        self._change = commit.change
        before = set(self.everybody)
        self.everybody = tuple(worker(index) for index in commit.workers) or tuple(sorted(self._all))
        return before - set(self.everybody), set(self.everybody) - before
