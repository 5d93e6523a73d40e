"""A worker's question for the norm of a step's mean: repeated until the coordinator has answered it.

There is one at most. The step may go on meanwhile, and so may the next one: the answer comes when it is known.
"""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import Effect, NormKnown, Send
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Seal, TotalNorm
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind


class NormQuestions:
    """What this worker has asked, and has not heard."""

    def __init__(self, coordinator: TaskId) -> None:
        self.number = 0
        """How often it has asked in this step."""
        self.coordinator = coordinator
        self._asked: Seal | None = None
        self._since = 0.0
        self._repeat_at = 0.0

    def ask(self, seal: Seal, now: float) -> None:
        """This seal has been sent to all servers; the coordinator is on one of them."""
        self._asked = seal
        self._since, self._repeat_at = now, now + REPEAT_SECONDS

    def on_total(self, total: TotalNorm) -> list[Effect]:
        asked = self._asked
        if asked is None or (asked.step, asked.number) != (total.step, total.number):
            return []
        self._asked = None
        return [NormKnown(total.step, total.number, total.norm)]

    def on_link_up(self, now: float) -> list[Effect]:
        if self._asked is None:
            return []
        self._repeat_at = now + REPEAT_SECONDS
        return [Send(self.coordinator, self._asked)]

    def on_tick(self, now: float) -> list[Effect]:
        return self.on_link_up(now) if self._asked is not None and now >= self._repeat_at else []

    def next_deadline(self) -> float | None:
        return None if self._asked is None else self._repeat_at

    def waits(self, task: TaskId) -> list[Wait]:
        if self._asked is None:
            return []
        return [
            Wait(
                task,
                self.coordinator,
                WaitKind.NORM,
                self._asked.step,
                self._since,
                self._repeat_at,
                phrases.asked_for(),
            )
        ]
