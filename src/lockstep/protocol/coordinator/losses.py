"""The workers that a running job has lost: it waits for them or continues without them, and takes them back."""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.coordinator.recovery import Loss, LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.ids import ClusterShape, Incarnation, Role, Step, TaskId
from lockstep.protocol.core.messages import MissingTask
from lockstep.protocol.core.waits import Wait, WaitKind


class Losses:
    """The coordinator's record of lost workers."""

    def __init__(self, rules: RecoveryRules, shape: ClusterShape) -> None:
        self._rules = rules
        self._everybody = shape.worker_ids()
        self._active = set(self._everybody)
        self._former: dict[TaskId, set[Incarnation]] = {}
        self._returned: set[TaskId] = set()
        self.lost: dict[TaskId, Loss] = {}
        self.change = 0
        """How often the contributors have changed."""

    # -- who takes part --

    def active(self) -> tuple[TaskId, ...]:
        """The workers that contribute to steps, including lost ones that are waited for."""
        return tuple(task for task in self._everybody if task in self._active)

    def contributors(self) -> tuple[int, ...]:
        """Their indices; empty: all workers."""
        return () if len(self._active) == len(self._everybody) else tuple(task.index for task in self.active())

    def is_lost(self, task: TaskId) -> bool:
        return task in self.lost

    def is_away(self, task: TaskId) -> bool:
        """Workers that are lost, or back but not yet taken in."""
        return task in self.lost or task in self._returned

    # -- a worker goes --

    def lose(self, task: TaskId, incarnation: Incarnation, reason: Reason, now: float, *, may_shrink: bool) -> bool:
        """Note a loss; True if the job continues without this worker from now on."""
        self.lost[task] = Loss(incarnation, now, reason)
        self._former.setdefault(task, set()).add(incarnation)
        self._returned.discard(task)
        shrinks = self._rules.on_worker_loss is LossPolicy.SHRINK and may_shrink
        if not shrinks or task not in self._active or not any(w not in self.lost for w in self._active):
            return False
        self._active.discard(task)
        self.change += 1
        return True

    def found_again(self, task: TaskId, incarnation: Incarnation) -> bool:
        """The incarnation that counted as lost is alive; True if it still takes part."""
        loss = self.lost.get(task)
        if loss is None or loss.incarnation != incarnation or task not in self._active:
            return False
        del self.lost[task]
        self._former[task].discard(incarnation)
        return True

    # -- and comes back --

    def may_come_back(self, task: TaskId, incarnation: Incarnation) -> bool:
        """Whether this incarnation may replace one that was lost; a lost one never comes back."""
        if not self._rules.takes_back or task.role is not Role.WORKER:
            return False
        return incarnation not in self._former.get(task, ())

    def come_back(self, task: TaskId, former: Incarnation) -> bool:
        """Another incarnation is here; True if it takes part at once, because no step was made without it."""
        self.lost.pop(task, None)
        self._former.setdefault(task, set()).add(former)
        if task in self._active:
            return True
        self._returned.add(task)
        return False

    def take_in(self) -> tuple[TaskId, ...]:
        """Let the workers that came back take part from now on, and return them."""
        back = tuple(sorted(self._returned))
        if back:
            self._active |= self._returned
            self._returned.clear()
            self.change += 1
        return back

    # -- time, and what others may ask --

    @property
    def is_waiting(self) -> bool:
        """Whether the job is waiting for a lost worker."""
        return any(task in self._active for task in self.lost)

    def deadline(self) -> float | None:
        due = [loss.since + self._rules.rejoin_seconds for task, loss in self.lost.items() if task in self._active]
        return min(due, default=None)

    def overdue(self, now: float) -> tuple[TaskId, Loss] | None:
        for task, loss in self.lost.items():
            if task in self._active and now >= loss.since + self._rules.rejoin_seconds:
                return task, loss
        return None

    def missing(self, now: float) -> tuple[MissingTask, ...]:
        """Who was lost and why, for every task to report; ``attempts`` is 1 for a worker that is waited for."""
        found = []
        for task, loss in sorted(self.lost.items()):
            waited = task in self._active
            if waited:
                text = phrases.waited_for_to_come_back(loss.reason.text, self._rules.rejoin_seconds)
            else:
                text = phrases.goes_on_without(loss.reason.text)
            found.append(MissingTask(str(task), "", text, now - loss.since, int(waited)))
        return tuple(found)

    def waits(self, here: TaskId, step: Step) -> list[Wait]:
        seconds = self._rules.rejoin_seconds
        return [
            Wait(here, task, WaitKind.RETURN, step, loss.since, loss.since + seconds, loss.reason.text)
            for task, loss in self.lost.items()
            if task in self._active
        ]
