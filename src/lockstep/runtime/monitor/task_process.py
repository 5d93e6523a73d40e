"""The monitor's handle on its task: started through a reaper, asked to end, killed, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.foreign import JsonError, read_json
from lockstep.runtime import processes
from lockstep.runtime.monitor import reaper
from lockstep.runtime.monitor.door import RUN_VARIABLE, RunDoor
from lockstep.runtime.monitor.reporter import MAX_LINE_BYTES, LineBuffer, ReportReader, TaskReport

REPORT_FD: Final = "{report_fd}"
"""In a command, this text is replaced by the number of the descriptor for ``TaskReporter``."""

FINISHED: Final = "--lockstep_finished"
"""This word is removed from a command, except for an incarnation after one that had finished its work."""
LATER: Final = "--lockstep_later={former_job}"
"""The same, except for every incarnation after the first that this monitor started; it is told which job the former one
was in."""
MARKS: Final = (FINISHED, LATER)
_LATER_FLAG: Final = LATER.partition("=")[0]


@dataclass(frozen=True, slots=True)
class FormerLife:
    """What a task is told of the incarnations before it. ``job``: 0 if they were in none."""

    finished: bool = False
    exists: bool = False
    job: int = 0

    def marked(self, command: Sequence[str]) -> list[str]:
        """The command with what applies of ``MARKS``."""
        kept = {FINISHED: self.finished, LATER: self.exists}
        words = [word for word in command if kept.get(word, True)]
        return [f"{_LATER_FLAG}={self.job:016x}" if word == LATER else word for word in words]


NO_FORMER_LIFE: Final = FormerLife()


def read_marks(words: Sequence[str]) -> tuple[list[str], FormerLife]:
    """The words of a task's command without marks, and what these say."""
    flags = [word.partition("=") for word in words]
    later = [value for name, _, value in flags if name == _LATER_FLAG]
    rest = ["".join(flag) for flag in flags if flag[0] not in (FINISHED, _LATER_FLAG)]
    return rest, FormerLife(FINISHED in words, bool(later), int(later[0], 16) if later else 0)


@dataclass(slots=True)
class KeeperNews:
    """What the reaper has reported so far."""

    pid: int = 0
    exit_code: int | None = None
    problem: str = ""
    stuck: tuple[int, ...] = ()
    gone: bool = False


def words_of(command: Sequence[str], report_number: int) -> list[str]:
    """The command of one incarnation."""
    return [part.replace(REPORT_FD, str(report_number)) for part in command]


class ReaperHandle:
    """A reaper that this process has started, or one that it was given."""

    def __init__(self, process: subprocess.Popen[bytes] | None, pidfd: int = -1) -> None:
        self._process = process
        self.pid = 0 if process is None else process.pid
        self.pidfd = pidfd if process is None else os.pidfd_open(process.pid)

    def reaped(self) -> bool:
        """Whether this process, its parent, has seen it end."""
        return self._process is None or self._process.poll() is not None

    def see_off(self, seconds: float) -> None:
        """Wait for its end; kill it if that takes longer."""
        if not processes.wait_readable({self.pidfd}, seconds):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            processes.wait_readable({self.pidfd}, None)
        os.close(self.pidfd)
        if self._process is not None:
            self._process.wait()


class TaskProcess:
    """One incarnation of a task. Create it on the main thread of a process that is a subreaper."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        takes_signals: bool = False,
        door: RunDoor | None = None,
        passed: Collection[int] = (),
    ) -> None:
        """``takes_signals``: the task handles signals itself, from its start. ``door``: the task is any program, which
        introduces itself there, and gets signals as they come. ``passed``: further descriptors for it."""
        command_reader, commands = os.pipe()
        status_reader, status_writer = os.pipe()
        report_reader, report_writer = os.pipe()
        self.report_number = report_writer
        """The descriptor of reports in the task."""
        inherited = (command_reader, status_writer, report_writer)
        argv = words_of(command, report_writer)
        environ = None if door is None else {**os.environ, RUN_VARIABLE: door.described(report_writer)}
        also = (*passed, *(() if door is None else (door.guest.fileno(),)))
        try:
            reaper_process = subprocess.Popen(
                reaper.reaper_command(*inherited, argv, holds=takes_signals),
                stdin=subprocess.DEVNULL,
                pass_fds=(*inherited, *also),
                start_new_session=True,
                env=environ,
            )
        finally:
            if door is not None:
                door.guest.close()
            for descriptor in inherited:
                os.close(descriptor)
        self._hold(commands, status_reader, report_reader, ReaperHandle(reaper_process), takes_signals or bool(door))

    @classmethod
    def adopted(
        cls, commands: int, status: int, report: int, reaper_pidfd: int, *, pid: int, report_number: int
    ) -> TaskProcess:
        """A process that another one has started for this one, which has its descriptors now. It takes signals."""
        self = cls.__new__(cls)
        self.report_number = report_number
        self._hold(commands, status, report, ReaperHandle(None, reaper_pidfd), takes_signals=True)
        self.news.pid = pid
        return self

    def reaped(self) -> bool:
        """Reap the reaper of a process that another one has adopted; whether it has ended."""
        return self._reaper.reaped()

    def _hold(self, commands: int, status: int, report: int, handle: ReaperHandle, takes_signals: bool) -> None:
        self._commands, self.status_fd, self.report_fd = commands, status, report
        self._reaper = handle
        self._takes_signals = takes_signals
        self._status_lines = LineBuffer(MAX_LINE_BYTES)
        self._reports = ReportReader(report)
        self.news = KeeperNews()
        os.set_blocking(status, False)

    @property
    def reaper_pid(self) -> int:
        """0 if it is not a child of this process."""
        return self._reaper.pid

    def lent(self) -> tuple[int, int, int, int]:
        """Commands, status, reports, the reaper: what another process needs to ``adopt`` this one."""
        return self._commands, self.status_fd, self.report_fd, self._reaper.pidfd

    def let_go(self) -> None:
        """Another process has adopted it."""
        for descriptor in self.lent():
            os.close(descriptor)

    def ask_to_end(self, signum: int) -> None:
        """Send the signal itself to a task that takes it, else SIGTERM: Python responds to SIGINT with a traceback."""
        self._command(reaper.SIGNALS[signal.Signals(signum)] if self._takes_signals else reaper.ASK)

    def ask_for_files(self) -> bool:
        """Send SIGUSR1 to a task that takes it; whether this one does. It would kill any other."""
        if self._takes_signals:
            self._command(reaper.SIGNALS[signal.SIGUSR1])
        return self._takes_signals

    def pass_on(self, signum: int) -> None:
        """Send a signal that does not ask for the end."""
        self._command(reaper.SIGNALS[signal.Signals(signum)])

    def kill(self) -> None:
        self._command(reaper.KILL)

    def _command(self, command: bytes) -> None:
        try:
            os.write(self._commands, command)
        except BrokenPipeError:
            return  # the reaper is gone, and the task with it

    def read_status(self) -> KeeperNews:
        """Read what the reaper reports; call it when ``status_fd`` is readable."""
        data = processes.read_available(self.status_fd)
        if data is None:
            self.news.gone = True
            if self.news.exit_code is None:
                # Only a SIGKILL ends a reaper before its task, and the kernel then kills the task.
                self.news.exit_code = -9
                self.news.problem = self.news.problem or "its reaper was killed, and the kernel killed it after that"
            return self.news
        for line in self._status_lines.feed(data):
            with contextlib.suppress(JsonError):  # a line that something else has written there
                self._on_news(read_json(line, MAX_LINE_BYTES))
        return self.news

    def _on_news(self, said: object) -> None:
        match said:
            case {"started": int(pid)}:
                self.news.pid = pid
            case {"exited": int(code)}:
                self.news.exit_code = code
            case {"failed": str(problem)}:
                self.news.problem = problem
            case {"stuck": list(pids)}:
                self.news.stuck = tuple(pid for pid in pids if isinstance(pid, int))

    def read_reports(self) -> tuple[list[TaskReport], bool]:
        """The task's reports since the last call, and whether more may come later."""
        return self._reports.read()

    def close(self, seconds: float) -> None:
        """Wait for the reaper, which ends what the task left behind; kill it if that takes longer than ``seconds``."""
        os.close(self._commands)
        self._reaper.see_off(seconds)
        os.close(self.status_fd)
        os.close(self.report_fd)
