"""How a job ended on one task, and the error that carries it into a training loop."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import LockstepError
from lockstep.protocol.core.causes import NO_REASON, Reason
from lockstep.protocol.core.effects import JobEnded
from lockstep.protocol.core.ids import Step
from lockstep.protocol.core.leaving import Departure
from lockstep.runtime import phrases


@dataclass(frozen=True, slots=True)
class Outcome:
    """Success, or the first real error of the whole job."""

    ok: bool
    culprit: str = ""
    step: Step = -1
    reason: Reason = NO_REASON
    again: bool = False
    """The job restarts from its newest checkpoint, and this task joins it as a new incarnation."""
    unsaved: bool = False
    """Set on the coordinator's server: all steps completed, but no checkpoint has the last version."""

    departure: Departure | None = None
    """The signal that ended it, to this task or to another one."""
    alone: bool = False
    """Only this task left; the job may continue."""

    def exit_code(self, failed: int = 1) -> int:
        """0, 128 plus the signal number, or ``failed``."""
        if self.ok:
            return 0
        return failed if self.departure is None else self.departure.exit_code

    def sentence(self) -> str:
        """One line for people."""
        if self.ok:
            return phrases.ended_well(self.step)
        if self.alone:
            return phrases.left_alone(self.culprit, self.reason.text)
        if self.again:
            return phrases.goes_back(self.step, self.culprit, self.reason.text)
        return phrases.ended(self.step, self.culprit, self.reason)


def outcome_of(end: JobEnded) -> Outcome:
    """The end as the machines report it."""
    return Outcome(end.ok, end.culprit, end.step, end.reason, end.again, departure=end.departure, alone=end.alone)


class JobEndedError(LockstepError):
    """The job is over, so what the caller waits for will not come. ``outcome`` gives the reason."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.sentence())
        self.outcome = outcome
