"""The reaper: the parent of a task, which leaves nothing of it behind.

It sits between the monitor and the task because the monitor may be killed too, by a signal that it cannot handle.
The reaper is a bare interpreter with one thread. It starts the task in its own session, reports its exit code, and ends
every descendant of the task, whatever happens to the monitor:

* task ended: its code goes to the monitor, then leftover processes are ended;
* monitor gone (the command pipe ends): the task and everything it started are killed;
* reaper killed: the kernel kills the task (parent death signal), and the monitor, a subreaper as well, ends the rest.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from lockstep.protocol.core.timing import LEFTOVER_GRACE_SECONDS, LEFTOVER_SECONDS
from lockstep.runtime import processes

ASK: Final = b"a"
"""Command: ask the task to end (SIGTERM)."""

SIGNALS: Final = MappingProxyType(
    {
        signal.SIGTERM: ASK,
        signal.SIGINT: b"i",
        signal.SIGHUP: b"h",
        signal.SIGUSR1: b"u",
        signal.SIGUSR2: b"v",
    }
)
"""Commands: pass this signal on to a task that takes signals itself."""

KILL: Final = b"k"
"""Command: kill the task (SIGKILL)."""

HELD: Final = (*processes.STOP_SIGNALS, signal.SIGUSR1)


class Reaper:
    """Starts one task and stays until none of its processes is left."""

    def __init__(self, monitor_pid: int, commands: int, status: int, report: int, *, holds: bool = False) -> None:
        """``holds``: signals are held back until the task handles them itself, so that none comes too early."""
        self._holds = holds
        self._monitor_pid = monitor_pid
        self._commands = commands
        self._status = status
        self._report = report
        self._task = 0
        self._ended = False

    def run(self, command: Sequence[str]) -> int:
        """Returns 0 if nothing is left, 1 if a process could not be killed."""
        processes.become_subreaper()
        for descriptor in (self._commands, self._status, self._report):
            os.set_inheritable(descriptor, False)
        os.set_blocking(self._commands, False)
        with processes.SignalInbox((signal.SIGCHLD, *HELD)) as inbox:
            self._task = self._start(command)
            os.close(self._report)
            self._tell(started=self._task)
            self._keep(inbox)
        processes.remove_cuda_memory(self._task)
        stuck = processes.end_descendants(LEFTOVER_GRACE_SECONDS, LEFTOVER_SECONDS)
        if stuck:
            self._tell(stuck=[facts.pid for facts in stuck])
        return 1 if stuck else 0

    def _start(self, command: Sequence[str]) -> int:
        reaper = os.getpid()
        # Until exec the new process has the reaper's handlers, which would swallow a request to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        task = os.fork()
        if task != 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
            return task
        try:
            self._become_task(reaper, command)
        except OSError as error:
            self._tell(failed=f"cannot start {command[0]}: {error.strerror}")
        finally:
            os._exit(127)

    def _become_task(self, reaper: int, command: Sequence[str]) -> None:
        # Its own session: Ctrl-C in a terminal reaches only the monitor, which decides what the task receives.
        os.setsid()
        processes.die_with_parent(reaper)
        processes.let_read_stacks(self._monitor_pid)
        signal.set_wakeup_fd(-1)
        processes.restore_signals()
        if not self._holds:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        os.set_inheritable(self._report, True)
        os.execvp(command[0], list(command))

    def _keep(self, inbox: processes.SignalInbox) -> None:
        """Until the task has ended. The reaper ignores stop signals to itself: they belong to the monitor."""
        watched = {self._commands, inbox.fileno()}
        while not self._ended:
            ready = processes.wait_readable(watched, None)
            if inbox.fileno() in ready:
                inbox.take()
                processes.reap_children(self._on_reaped)
            if self._commands in ready and not self._obey():
                watched.discard(self._commands)

    def _on_reaped(self, pid: int, exit_code: int) -> None:
        if pid == self._task:
            self._ended = True
            self._tell(exited=exit_code)

    def _obey(self) -> bool:
        """Carry out what the monitor asks for; False if the monitor is gone."""
        commands = processes.read_available(self._commands)
        if self._ended:
            return commands is not None
        if commands is None or KILL in commands:
            os.kill(self._task, signal.SIGKILL)
            return commands is not None
        for signum, command in SIGNALS.items():
            if command in commands:
                os.kill(self._task, signum)
        if any(SIGNALS[signum] in commands for signum in processes.STOP_SIGNALS):
            os.kill(self._task, signal.SIGCONT)  # a stopped task would not notice
        return commands is not None

    def _tell(self, **facts: object) -> None:
        try:
            os.write(self._status, json.dumps(facts).encode() + b"\n")
        except OSError:
            return  # the monitor is gone; the command pipe shows that too


def main(arguments: Sequence[str]) -> int:
    """Arguments: the monitor's pid, the descriptors of commands, status and report, ``holds``, the task's command."""
    monitor_pid, commands, status, report, holds = (int(text) for text in arguments[:5])
    return Reaper(monitor_pid, commands, status, report, holds=bool(holds)).run(arguments[5:])


def reaper_command(
    commands: int, status: int, report: int, command: Sequence[str], *, holds: bool = False
) -> list[str]:
    """What the monitor runs to start a reaper."""
    code = "from lockstep.runtime.monitor import reaper; sys.exit(reaper.main(sys.argv[2:]))"
    descriptors = (str(commands), str(status), str(report), str(int(holds)))
    return processes.python_without_site(code, str(os.getpid()), *descriptors, *command)
