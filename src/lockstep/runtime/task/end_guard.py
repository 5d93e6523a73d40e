"""Sees to it that a process ends after its job has failed, even if its training thread does not notice that.

It may wait for a decoder or for a lock, or be inside native code or a device call that never returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.task.outcome import Outcome

GiveUp = Callable[[Outcome], None]
"""Ends the process, with the exit code that this outcome asks for."""


class EndGuard:
    """``noticed`` is set once the training thread knows of the end."""

    def __init__(self, sentence: Callable[[], str], say: Callable[[str], None], reporter: TaskReporter) -> None:
        """``sentence``: what is printed before the process is ended."""
        self.noticed = threading.Event()
        self._sentence = sentence
        self._say = say
        self._reporter = reporter

    def on_end(
        self,
        outcome: Outcome,
        seconds: float,
        give_up: GiveUp | None,
        spared: Callable[[], bool] | None = None,
    ) -> None:
        """The job has ended. If it failed, call ``give_up`` unless that is noticed within ``seconds``.

        ``spared``: whether the thread is in something that must not be cut off. The process is a program of the user's
        then, and only this decides when it has to leave, not its monitor.
        """
        forced = give_up is not None and not outcome.ok
        self._reporter.over(must_leave=forced and spared is None)
        if forced:
            args = (outcome, seconds, give_up, spared or _never)
            threading.Thread(target=self._wait, args=args, name="see to the end", daemon=True).start()

    def on_close(self) -> None:
        """The task leaves by itself."""
        self.noticed.set()
        self._reporter.over(must_leave=False)

    def _wait(self, outcome: Outcome, seconds: float, give_up: GiveUp, spared: Callable[[], bool]) -> None:
        while not self.noticed.wait(seconds):
            if not spared():
                self._say(self._sentence())
                give_up(outcome)
                return


def _never() -> bool:
    return False
