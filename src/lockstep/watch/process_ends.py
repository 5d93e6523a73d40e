"""Sees processes end, and how, before their parent reaps them: a launcher looks every tenth of a second, so this has a
thread of its own, which does nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.runtime.processes import exit_code_unreaped


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """``at``: seconds since 1970. ``exit_code``: None where the parent was faster."""

    at: float
    exit_code: int | None


class ProcessEnds:
    """Of the processes that it was given."""

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        """``at_once``: what cannot wait for ``take``; on the thread of this."""
        self._at_once = at_once
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when somebody has died since ``take``."""
        self._poll = select.epoll()
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._over, select.EPOLLIN)
        self._watched: dict[int, int] = {}
        self._found: dict[int, ProcessEnd] = {}
        self._thread = threading.Thread(target=self._run, name="deaths", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            self._note(pid)
            return
        self._watched[descriptor] = pid
        self._poll.register(descriptor, select.EPOLLIN)

    def of(self, pid: int) -> ProcessEnd | None:
        return self._found.get(pid)

    def take(self) -> bool:
        """Whether anybody has died since this was last asked."""
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(self.descriptor) > 0
        return False

    def close(self) -> None:
        os.eventfd_write(self._over, 1)
        self._thread.join()
        for descriptor in self._watched:
            os.close(descriptor)
        self._poll.close()
        os.close(self._over)
        os.close(self.descriptor)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._over:
                    return
                self._note(self._watched[descriptor])
                self._poll.unregister(descriptor)
            self._at_once()

    def _note(self, pid: int) -> None:
        self._found[pid] = ProcessEnd(time.time(), exit_code_unreaped(pid))
        os.eventfd_write(self.descriptor, 1)
