"""Whose gradients make each step: those of all workers, or of those that are left, or that the coordinator decides."""

from __future__ import annotations

from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, Step, TaskId


class ContributingWorkers:
    """Who contributes to each step, as far as this server knows."""

    def __init__(self, workers: tuple[TaskId, ...], aggregate: int | None) -> None:
        """``aggregate``: how many workers make a step, if not all; which ones, the coordinator decides."""
        self.usual = workers
        """All workers, minus lost ones where the job continues without them."""
        self.change = 0
        """The number of the last change of that."""
        self._all = frozenset(workers)
        self.aggregate = aggregate
        self._decided: dict[Step, tuple[TaskId, ...]] = {}

    def of(self, step: Step) -> tuple[TaskId, ...]:
        """The workers whose gradients may make step ``step``, in the order of reduction."""
        if step == INITIAL_STEP:
            return (CHIEF,)
        return self._decided.get(step, self.usual)

    def includes(self, task: TaskId, step: Step) -> bool:
        """Whether ``task`` is one of them; asked for every arrival, so it does not walk through all workers."""
        return task in (self.of(step) if step == INITIAL_STEP or step in self._decided else self._all)

    def is_known(self, step: Step) -> bool:
        """Whether it is certain already who makes this step."""
        return self.aggregate is None or step == INITIAL_STEP or step in self._decided

    def decide(self, step: Step, workers: tuple[TaskId, ...]) -> bool:
        """The coordinator's word; returns whether it is new."""
        if step in self._decided:
            return False
        self._decided[step] = workers
        return True

    def forget(self, step: Step) -> None:
        self._decided.pop(step, None)
