"""What workers ask a server with second homes outside of the steps, and when it may answer.

Nothing is told of a state that only one server has. And what was asked of a server that is not the home in that view,
as far as it knows, may have been answered by another one long before this one becomes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lockstep.protocol.core.effects import Effect, Send, Serve
from lockstep.protocol.core.ids import BucketId, TaskId
from lockstep.protocol.core.messages import Answer, Question


@dataclass(slots=True)
class Answering:
    """The open questions of all workers; each has one at a time."""

    _asked: dict[TaskId, Question] = field(default_factory=dict)
    """What can be answered only in a later view, or once a second home has a state."""
    _answers: dict[TaskId, tuple[BucketId, Answer]] = field(default_factory=dict)
    """Answers that wait for the second home of this bucket."""
    _changed: dict[TaskId, Answer] = field(default_factory=dict)
    """The last one to a question that changed something: that is done once, however often it is asked."""

    def ask(self, asker: TaskId, question: Question) -> list[Effect]:
        changed = self._changed.get(asker)
        if changed is None or changed.number != question.number:
            self._asked[asker] = question
            return []
        # Repeated: while the second home takes a copy, or because the answer was lost with a link.
        return [] if asker in self._answers else [Send(asker, changed)]

    def forget(self, asker: TaskId) -> None:
        for known in (self._asked, self._answers, self._changed):
            known.pop(asker, None)

    def has_changed(self, asker: TaskId, bucket: BucketId, answer: Answer) -> None:
        """The store has another state of this bucket: the answer waits for its second home."""
        self._answers[asker], self._changed[asker] = (bucket, answer), answer

    def what_can_be(self, view: int, buckets: Collection[BucketId], lags: Callable[[BucketId], bool]) -> list[Effect]:
        """``buckets``: those that this server is the home of; ``lags``: whether a second home has not all of one."""
        effects: list[Effect] = []
        for asker, question in list(self._asked.items()):
            if question.view > view:
                continue
            if question.bucket not in buckets:
                del self._asked[asker]
            elif not lags(question.bucket):
                del self._asked[asker]
                effects.append(Serve(asker, question, tells=question.changes))
        for asker, (bucket, answer) in list(self._answers.items()):
            if not lags(bucket):
                del self._answers[asker]
                effects.append(Send(asker, answer))
        return effects
