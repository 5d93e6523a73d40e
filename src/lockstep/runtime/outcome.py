"""How a job ended on one task, and the error that carries it into a training loop."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.effects import JobEnded
from lockstep.protocol.ids import Step
from lockstep.protocol.leaving import Departure


@dataclass(frozen=True, slots=True)
class Outcome:
    """Well, or with the first real error of the whole job."""

    ok: bool
    culprit: str = ""
    step: Step = -1
    reason: str = ""
    again: bool = False
    """The job begins again, from its newest checkpoint: this task takes part in another life."""

    departure: Departure | None = None
    """The signal by which it ended, of this task or of another one."""
    alone: bool = False
    """Only this task left; the job may go on."""

    def exit_code(self, failed: int = 1) -> int:
        """0, 128 and the signal, or ``failed``."""
        if self.ok:
            return 0
        return failed if self.departure is None else self.departure.exit_code

    def sentence(self) -> str:
        """One line for people."""
        if self.ok:
            return f"the job ended well after {self.step} steps"
        if self.alone:
            return f"{self.culprit} {self.reason}"
        where = f" in step {self.step}" if self.step >= 0 else ""
        if self.again:
            return f"the job goes back to its newest checkpoint{where}: {self.culprit} {self.reason}"
        return f"the job ended{where}: {self.culprit} {self.reason}".replace(": :", ":")


def outcome_of(end: JobEnded) -> Outcome:
    """What the machines say of the end."""
    return Outcome(end.ok, end.culprit, end.step, end.reason, end.again, end.departure, end.alone)


class JobEndedError(Exception):
    """The job is over, so what was waited for will not come. ``outcome`` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.sentence())
        self.outcome = outcome
