"""One thread for a transport's odd jobs: deadlines, and callbacks for which no other thread is free."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

from lockstep.transports.guard import Guard


class Timer:
    """A job for the timers; ``cancel`` takes it back if it has not begun."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job

    def cancel(self) -> None:
        self._job = None

    def run(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job()


class TimerThread:
    """Runs errands one after another, each no earlier than it is due. Errands must not block."""

    def __init__(self, name: str) -> None:
        self._wake = threading.Condition()
        self._order = count()
        self._due: list[tuple[float, int, Timer]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, job: Callable[[], None]) -> Timer:
        """Run ``job`` as soon as possible, after earlier requests."""
        return self.later(0.0, job)

    def later(self, seconds: float, job: Callable[[], None]) -> Timer:
        """Run ``job`` after ``seconds``."""
        errand = Timer(job)
        with self._wake:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), errand))
            self._wake.notify()
        return errand

    def close(self) -> None:
        """Run what is already due, drop the rest, end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        guard = Guard(self._thread.name)
        while (errand := self._next()) is not None:
            guard.passes(errand.run)

    def _next(self) -> Timer | None:
        with self._wake:
            while True:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
                if self._closed:
                    return None
                self._wake.wait(wait)
