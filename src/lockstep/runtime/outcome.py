"""How a job ended on one task, and the error that carries it into a training loop."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.causes import NO_REASON, Reason
from lockstep.protocol.ids import Step
from lockstep.runtime import phrases


@dataclass(frozen=True, slots=True)
class Outcome:
    """Well, or with the first real error of the whole job."""

    ok: bool
    culprit: str = ""
    step: Step = -1
    reason: Reason = NO_REASON
    again: bool = False
    """The job begins again, from its newest checkpoint: this task takes part in another life."""
    unsaved: bool = False
    """Known to the coordinator's server: all steps were made, and the last version is in no checkpoint."""

    def sentence(self) -> str:
        """One line for people."""
        if self.ok:
            return phrases.ended_well(self.step)
        if self.again:
            return phrases.goes_back(self.step, self.culprit, self.reason.text)
        return phrases.ended(self.step, self.culprit, self.reason)


class JobEndedError(Exception):
    """The job is over, so what was waited for will not come. ``outcome`` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.sentence())
        self.outcome = outcome
