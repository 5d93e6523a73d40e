"""What the coordinator must hear from a server: it is said again until the coordinator shows that it knows."""

from __future__ import annotations

from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.ids import INITIAL_STEP, NOTHING_TO_APPLY, Step, TaskId
from lockstep.protocol.core.messages import Applied, Failed, Message
from lockstep.protocol.core.timing import REPEAT_SECONDS


class Statements:
    """What one server has to say, and when to say it again."""

    def __init__(self, coordinator: TaskId) -> None:
        self.applied: Step = INITIAL_STEP - 1
        self.failure: Failed | None = None
        self.repeat_at: float | None = None
        """When to send the coordinator again what it has not answered."""
        self._coordinator = coordinator

    def unheard(self, committed: Step, *, decided: bool) -> list[Message]:
        """What the coordinator has not confirmed. ``decided``: who makes the open step."""
        unheard: list[Message] = []
        # Any commit at all shows that it knows of a server without a bucket.
        shown = INITIAL_STEP if self.applied == NOTHING_TO_APPLY else self.applied
        # It may have received this, and its decision may have been lost in transit.
        if committed < shown or not decided:
            unheard.append(Applied(self.applied))
        if self.failure is not None:
            unheard.append(self.failure)
        return unheard

    def say(self, committed: Step, now: float, *, decided: bool) -> list[Effect]:
        unheard = self.unheard(committed, decided=decided)
        self.repeat_at = now + REPEAT_SECONDS if unheard else None
        return [Send(self._coordinator, message) for message in unheard]
