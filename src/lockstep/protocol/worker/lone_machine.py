"""The machine of a process that trains alone: there is nothing to agree on, but its own step may take too long."""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, JobEnded
from lockstep.protocol.core.events import Broken, Event, Finished, Sealed, SignalCame, StepBegun
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.core.journal import NO_BUCKET, Happening, Journal
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.waits import Wait, WaitKind


class LoneMachine:
    """A whole task without any other."""

    def __init__(self, task: TaskId, patience: float, journal: Journal, now: float) -> None:
        self.task = task
        self.step: Step = -1
        self._patience = patience
        self._journal = journal
        self._step_at = now
        self._computing = False
        self._ended = False

    @property
    def role(self) -> LoneMachine:
        return self

    @property
    def awaited(self) -> frozenset[TaskId]:
        return frozenset()

    def start(self, now: float) -> list[Effect]:  # noqa: ARG002 - the interface of every whole task
        return []

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case StepBegun(step=step):
                self.step, self._step_at, self._computing = step, now, True
            case Sealed(step=step):
                self._computing = False
                self._journal.record(now, Happening.SEALED, step, NO_BUCKET, None, "")
            case Finished():
                self._computing = False
            case Broken(culprit=culprit, step=step, reason=reason):
                return self._end(str(culprit), step, reason)
            case SignalCame(departure=departure):
                alone = not departure.ends_the_job
                text = phrases.left(departure) if alone else phrases.received(departure)
                return self._end(str(self.task), self.step, Reason(Cause.STOPPED, text), departure, alone=alone)
        return []

    def _end(
        self, culprit: str, step: Step, reason: Reason, departure: Departure | None = None, *, alone: bool = False
    ) -> list[Effect]:
        if self._ended:
            return []
        self._ended = True
        return [JobEnded(False, culprit, step, reason, departure=departure, alone=alone)]

    def next_deadline(self) -> float | None:
        return None

    def waits(self) -> list[Wait]:
        if self._ended or not self._computing:
            return []
        due = self._step_at + self._patience
        return [Wait(self.task, self.task, WaitKind.OWN_STEP, self.step, self._step_at, due, "computing")]

    def snapshot(self) -> dict[str, object]:
        return {"role": {"kind": "alone", "step": self.step}}

    def check(self) -> None:
        """Nothing of it can contradict anything else."""
