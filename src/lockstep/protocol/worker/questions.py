"""What a worker asks a server outside of the steps: rare, small in number, answered one by one.

The state of an optimizer is read and written this way. A question is numbered and idempotent, and it is repeated until
its answer comes, like every request. Where shards have second homes it is asked of whoever is the bucket's home.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.protocol.core.effects import Answered, Effect, Send
from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.messages import Answer, Question
from lockstep.protocol.core.timing import QUESTION_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind


@dataclass(slots=True)
class _Open:
    peer: TaskId
    question: Question
    since: float
    repeat_at: float
    of_home: bool


class Questions:
    """The questions of one worker that have no answer yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def ask(self, peer: TaskId, question: Question, now: float, *, of_home: bool) -> list[Effect]:
        """``of_home``: it is for whoever is the home of its bucket."""
        self._open[question.number] = _Open(peer, question, now, now + QUESTION_SECONDS, of_home)
        return [Send(peer, question)]

    def on_answer(self, peer: TaskId, answer: Answer) -> list[Effect]:
        """The first answer counts; a repeated one is dropped."""
        known = self._open.get(answer.number)
        if known is None or known.peer != peer:
            return []
        del self._open[answer.number]
        return [Answered(peer, answer)]

    def ask_homes(self, home_of: Callable[[BucketId], TaskId], view: int, now: float) -> list[Effect]:
        """A view may name another home for the bucket of a question: that one is asked."""
        moved = [one for one in self._open.values() if one.of_home and one.peer != home_of(one.question.bucket)]
        effects: list[Effect] = []
        for known in moved:
            known.peer, known.question = home_of(known.question.bucket), replace(known.question, view=view)
            effects += self._repeat(known, now)
        return effects

    def on_link_up(self, peer: TaskId, now: float) -> list[Effect]:
        return [effect for known in self._open.values() if known.peer == peer for effect in self._repeat(known, now)]

    def on_tick(self, now: float) -> list[Effect]:
        due = [known for known in self._open.values() if now >= known.repeat_at]
        return [effect for known in due for effect in self._repeat(known, now)]

    def _repeat(self, known: _Open, now: float) -> list[Effect]:
        known.repeat_at = now + QUESTION_SECONDS
        return [Send(known.peer, known.question)]

    def next_deadline(self) -> float | None:
        return min((known.repeat_at for known in self._open.values()), default=None)

    def waits(self, task: TaskId, step: Step) -> list[Wait]:
        return [
            Wait(
                task,
                known.peer,
                WaitKind.ANSWER,
                step,
                known.since,
                known.repeat_at,
                "asked",
                detail=known.question.what,
            )
            for known in self._open.values()
        ]
