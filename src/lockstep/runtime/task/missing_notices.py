"""Prints which tasks are missing: as each becomes due, and not all the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import MissingTask
from lockstep.protocol.core.timing import QUIET_SECONDS, SAY_SECONDS
from lockstep.runtime import phrases

MOST_SAID = 5
"""This many missing tasks get a line each; the others are only named."""


class MissingNotices:
    """What one task prints of others, which have yet to join or were lost."""

    def __init__(self, task: TaskId, say: Callable[[str], None], forming: Callable[[], bool]) -> None:
        self._task = task
        self._say = say
        self._forming = forming
        self._said_at: dict[str, float] = {}

    def tell(self, missing: Sequence[MissingTask]) -> None:
        """These are missing now."""
        now = time.monotonic()
        due = [one for one in missing if self._is_due(one, now)]
        for one in due[:MOST_SAID]:
            if self._was_member(one):
                self._say(phrases.is_lost(self._task, one.task, one.finding))
            else:
                self._say(phrases.waits_for_missing(self._task, one.task, one.address, one.finding, one.attempts))
        if rest := due[MOST_SAID:]:
            self._say(phrases.waits_for_more(self._task, [one.task for one in rest]))
        self._said_at.update(dict.fromkeys((one.task for one in due), now))

    def forget(self, task: TaskId) -> None:
        """It has come back: if it is lost again, that is printed at once."""
        self._said_at.pop(str(task), None)

    def _is_due(self, one: MissingTask, now: float) -> bool:
        if now - self._said_at.get(one.task, 0.0) < SAY_SECONDS:
            return False
        return self._was_member(one) or (one.attempts > 0 and one.seconds >= QUIET_SECONDS)

    def _was_member(self, one: MissingTask) -> bool:
        """A member that was lost, rather than a task that has yet to join; this is printed at once."""
        return not one.address and not self._forming()
