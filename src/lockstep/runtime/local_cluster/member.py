"""One task of a local cluster as its launcher sees it: a monitor process, its output, and what it reports."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from lockstep.protocol.core.ids import CHIEF, TaskId
from lockstep.protocol.core.messages import Description
from lockstep.runtime import processes
from lockstep.runtime.local_cluster.output_relay import Relay, open_log
from lockstep.runtime.monitor.spares import SpareDesk
from lockstep.transports.control.monitor_client import Watch, watch

_WATCH_AGAIN_SECONDS: Final = 0.2
_OUTPUT_SECONDS: Final = 2.0
"""How long to wait for output after the monitor has ended, if some process still holds the pipe open."""


@dataclass(frozen=True, slots=True, order=True)
class Death:
    """The end of a task that failed: when (monotonic), which monitor reports it, and how."""

    at: float
    address: str
    how: str


class Deaths:
    """Collects what the monitors report, on the watches' threads, and wakes the launcher's loop."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._told: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._known: dict[str, Death] = {}

    def fileno(self) -> int:
        return self._reader.fileno()

    def on_description(self, address: str, found: Description) -> None:
        """Called on a watch's thread."""
        if not found.exited or found.exit_code == 0:
            return
        signum = -found.exit_code
        how = f"killed by {processes.signal_name(signum)}" if signum > 0 else f"exit code {found.exit_code}"
        self._told.put(Death(time.monotonic() - found.phase_seconds, address, how))
        try:
            self._writer.send(b"d")
        except OSError:
            return  # full: the loop is awake anyway; closed: it has ended

    def failures(self) -> list[Death]:
        """All failures reported so far, earliest first."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        while not self._told.empty():
            death = self._told.get()
            self._known.setdefault(death.address, death)
        return sorted(self._known.values())

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class ClusterMember:
    """Created before any task starts, so that all addresses are known; started on the main thread."""

    def __init__(
        self,
        task: TaskId,
        address: str,
        command: Sequence[str],
        logs: Path | None,
        show_all: bool,
        reports: set[str],
        spares: SpareDesk | None = None,
    ) -> None:
        """``reports``: those that the cluster has shown, shared by all its members. ``spares``: where the monitor
        gets a spare if its task is lost."""
        self.task = task
        self._reports = reports
        self._spares = spares
        self.address = address
        self.exit_code: int | None = None
        self.relays: list[Relay] = []
        self._finished_relays: list[Relay] = []
        self._command = command
        self._logs = logs
        self._show_all = show_all
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._watch: Watch | None = None
        self._watch_lost = False
        self._watch_at = 0.0
        self.ended_at = 0.0

    def start(self) -> None:
        """Start the monitor; it dies with this process. The chief writes to the real stdout, terminal or not."""
        self._log = open_log(self._logs, self.task.short)
        with processes.stop_signals_held():
            process = subprocess.Popen(
                processes.dies_with_this_process(self._command),
                stdin=subprocess.DEVNULL,
                stdout=None if self.task == CHIEF else subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=() if self._spares is None else (self._spares.guest.fileno(),),
                env=None if self._spares is None else self._spares.environ(),
                # Ctrl-C in a terminal reaches the launcher only, which passes it on.
                start_new_session=True,
            )
        if self._spares is not None:
            self._spares.guest.close()
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        for pipe, shown in ((process.stderr, True), (process.stdout, self._show_all)):
            if pipe is not None:
                self.relays.append(Relay(self.task.short, os.dup(pipe.fileno()), shown, self._log, self._reports))
                pipe.close()
        self._watch_at = time.monotonic() + _WATCH_AGAIN_SECONDS

    def descriptors(self) -> set[int]:
        """What to wait for."""
        watched = {relay.reader for relay in self.relays}
        if self._spares is not None:
            watched |= self._spares.descriptors()
        return watched if self.exit_code is not None else {*watched, self._pidfd}

    def pump(self, ready: set[int]) -> None:
        """Pass on output; give up on a pipe that some process holds open long after the monitor's end."""
        if self._spares is not None:
            self._spares.look(ready)
        late = self.exit_code is not None and time.monotonic() > self.ended_at + _OUTPUT_SECONDS
        for relay in list(self.relays):
            open_still = relay.reader not in ready or relay.pump()
            if not open_still or late:
                self.relays.remove(relay)
                self._finished_relays.append(relay)
                relay.close()

    def take_exit_code(self) -> int | None:
        """The exit code, if the monitor has ended since the last call."""
        if self._process is None or self.exit_code is not None:
            return None
        self.exit_code = self._process.poll()
        self.ended_at = time.monotonic()
        return self.exit_code

    def watch_again(self, deaths: Deaths, now: float) -> None:
        """Watch the monitor; retry later if it was not reached, because it takes a moment to listen."""
        if self.exit_code is not None or now < self._watch_at or (self._watch is not None and not self._watch_lost):
            return
        self._close_watch()
        self._watch_at = now + _WATCH_AGAIN_SECONDS
        self._watch_lost = False
        self._watch = watch(self.address, lambda found: deaths.on_description(self.address, found), self._on_lost)

    def _on_lost(self, _reason: str) -> None:
        self._watch_lost = True

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def signal(self, signum: int) -> None:
        """Signal the monitor, if it has not ended."""
        if self._process is not None and self.exit_code is None:
            self._process.send_signal(signum)

    def be_quiet(self) -> None:
        """Show nothing more of what this task prints, unless all output was requested."""
        for relay in () if self._show_all else self.relays:
            relay.be_quiet()

    def show_tail(self) -> None:
        """Show the last lines of this task that have not been shown yet."""
        for relay in (*self.relays, *self._finished_relays):
            relay.show_tail()

    def close(self) -> None:
        """Call it after the monitor's end; waits for one that was killed."""
        self._close_watch()
        if self._spares is not None:
            self._spares.close()
        if self._process is not None:
            self._process.wait()
            os.close(self._pidfd)
            self._process = None
        for relay in self.relays:
            relay.close()
        self.relays.clear()
        if self._log is not None:
            self._log.close()
