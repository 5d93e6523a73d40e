"""Keeps threads alive that others depend on: one bad message, or one bug, must not end them silently.

What they could not deal with is printed, at a bounded rate: a peer that repeats it must not fill a disk.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Final

from lockstep import terminal
from lockstep.foreign import plain
from lockstep.transports import phrases

SAY_EVERY: Final = 30.0
_LONGEST: Final = 500


class Guard:
    """For one thread, which alone uses it."""

    def __init__(
        self,
        thread: str,
        say: Callable[[str], None] = terminal.say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._say = say
        self._clock = clock
        self._said_at = -SAY_EVERY
        self._unsaid = 0

    def passes(self, work: Callable[[], object]) -> bool:
        """Do it; False if it raised, which has been or will be printed."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on
            self._note(error)
            return False
        return True

    def _note(self, error: Exception) -> None:
        now = self._clock()
        if now - self._said_at < SAY_EVERY:
            self._unsaid += 1
            return
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        what = plain(f"{type(error).__name__}: {error}", _LONGEST)
        self._say(phrases.thread_goes_on(self._thread, what, where, self._unsaid))
        self._said_at, self._unsaid = now, 0
