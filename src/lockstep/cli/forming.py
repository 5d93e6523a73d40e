"""Shows how a cluster forms: a live line on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator

from lockstep.protocol.core.ids import CHIEF, TaskId
from lockstep.runtime.phrases import ask_with
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.startup_progress import StartupProgress
from lockstep.terminal import CLEAR_LINE, say

QUIET_SECONDS = 3.0
"""A cluster that forms within this time is not worth a line in a log."""
LOG_EVERY = 5.0


class FormingDisplay:
    """Writes to stderr, from the watch's thread."""

    def __init__(self, patience: float = 0.0) -> None:
        """``patience``: after how many seconds the tasks give up, if that is known."""
        self._patience = patience
        self.live = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._written_at = 0.0
        self._last = ""
        self._closed = False

    def show(self, line: str) -> None:
        with self._lock:
            if self._closed:
                return
            if self.live:
                width = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"{CLEAR_LINE}{f'{self._time()}{line}'[:width]}")
                sys.stderr.flush()
                return
            now = time.monotonic()
            due = now - self._began >= QUIET_SECONDS and now - self._written_at >= LOG_EVERY
            if due and line != self._last:
                self._written_at, self._last = now, line
                say(line)
                sys.stderr.flush()

    def _time(self) -> str:
        """``12 s, 288 s left: ``; nothing before a person would wonder."""
        so_far = time.monotonic() - self._began
        if so_far < QUIET_SECONDS:
            return ""
        left = f", {self._patience - so_far:.0f} s left" if self._patience > so_far else ""
        return f"{so_far:.0f} s{left}: "

    def over(self) -> None:
        """The cluster has formed, or this process ends: leave no partial line behind."""
        with self._lock:
            if self.live and not self._closed:
                sys.stderr.write(CLEAR_LINE)
                sys.stderr.flush()
            self._closed = True


@contextlib.contextmanager
def forming_line(addresses: dict[TaskId, str], patience: float = 0.0) -> Iterator[None]:
    """Say where to ask about these tasks, and show how they come together, for as long as that takes."""
    say(ask_with(addresses[CHIEF]))
    display = FormingDisplay(patience)
    # On a terminal the chief shows its own bar as soon as it trains, and two live lines would overwrite each other.
    until = (CHIEF,) if display.live else tuple(addresses)
    watch = StartupProgress(addresses, until, display.show, display.over)
    watch.start()
    try:
        yield
    finally:
        watch.close()
        display.over()


def addresses_of(spec: ClusterSpec) -> dict[TaskId, str]:
    """Every task with its address."""
    return {task: spec.address_of(task) for task in spec.shape.tasks()}
