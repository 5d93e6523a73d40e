"""The monitor: the small process that a person starts, with the task as its child.

``run_monitor`` listens at the task's address at once, then starts the task, and from then on is one loop over
descriptors: signals from outside, the reaper's status lines, the task's own reports. gRPC's threads only read the
record.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Final

from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_VERDICT
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.timing import LINGER_SECONDS, REAPER_SECONDS, STOP_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.monitor.exit import Action, Stopping, TaskObserver, exit_code_after, linger
from lockstep.runtime.monitor.outlived import Outlived, has_left
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.monitor.task_process import FINISHED, LATER, TaskProcess
from lockstep.runtime.running_jobs import listed
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.terminal import say
from lockstep.transports.control.addresses import who_listens
from lockstep.transports.control.server import ListenError, PortTaken

TICK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSpec:
    """What to run, and where to answer for it."""

    task: TaskId
    host: str
    """The address to listen on."""
    port: int
    command: tuple[str, ...]
    """The task's argv; ``task_process.REPORT_FD`` in it becomes the descriptor number for its ``TaskReporter``."""
    version: str
    start: StartFacts | None = None
    """What the task was started with, for others to compare."""
    cluster: tuple[tuple[str, str], ...] = ()
    """Every task of the cluster with its address, so that anyone who finds this monitor finds the others too."""
    linger_seconds: float = LINGER_SECONDS
    """How long to answer for a task that failed, so that peers learn of it."""
    stop_seconds: float = STOP_SECONDS
    """How long the task may take to end when asked to."""
    takes_signals: bool = False
    """The task handles signals itself (``runtime/task/signals.py``): they are passed on as they arrive."""
    grace: float | None = None
    """How long it may take to end after SIGTERM, if that differs: it finishes a step and saves it."""
    restarts: int = 0
    """How often the task is restarted after a signal has killed it."""


def run_monitor(spec: MonitorSpec) -> int:
    """Run the task and answer for it until it has ended; returns the exit code to use.

    Call it on the main thread of a process that ends after it: it handles signals (and ignores them when it is done)
    and reaps every child. Writes one plain line to stderr if the task itself cannot report what happened: it was
    killed, it did not end, the port is taken.
    """
    with processes.SignalInbox((*processes.STOP_SIGNALS, signal.SIGUSR1), until_exit=True) as inbox:
        record = TaskRecord(str(spec.task), spec.version, os.getpid(), spec.cluster)
        try:
            service = MonitorService(spec.host, spec.port, record, spec.start)
        except ListenError as error:
            say(why_not_listening(spec.task, spec.port, error))
            return EXIT_BAD_INPUT
        try:
            processes.become_subreaper()
            with listed(str(spec.task), service.address, dict(spec.cluster), os.getpid()):
                return _Monitor(spec, record, inbox).run()
        finally:
            service.close()


def why_not_listening(task: TaskId, port: int, error: ListenError) -> str:
    """A sentence with a remedy, and with the process that uses the port, if known."""
    if not isinstance(error, PortTaken):
        return f"{error}; give an address of this machine for {task}"
    holder = who_listens(port)
    by_whom = "" if holder is None else f" by {holder}"
    return (
        f"cannot listen at {error.address} for {task}: the port is taken{by_whom}; end that process or use another port"
    )


class _Monitor:
    """The loop, from the start of the task to the end of the linger."""

    def __init__(self, spec: MonitorSpec, record: TaskRecord, inbox: processes.SignalInbox) -> None:
        self._spec = spec
        self._record = record
        self._inbox = inbox
        after_term: dict[int, float] = {} if spec.grace is None else {signal.SIGTERM: spec.grace + spec.stop_seconds}
        self._stopping = Stopping(spec.stop_seconds, after_term)
        self._observer = TaskObserver(str(spec.task), record)
        self._task = TaskProcess(spec.command, takes_signals=spec.takes_signals)
        self._reports_open = True
        self._outlived = Outlived(spec.task, record, spec.cluster, has_left)
        self._forced = False

    def run(self) -> int:
        try:
            exit_code = self._watch_lives()
            number = self._observer.ended(exit_code)
            self._say_why(exit_code)
            # After a forced end nobody is left to ask how it ended.
            quiet = exit_code == 0 or self._by_monitor or bool(self._record.report.leaving)
            linger(self._record, number, quiet, self._spec.linger_seconds, self._inbox)
        finally:
            self._leave_nothing()
        if self._task.news.problem:
            return EXIT_FAILED
        if self._forced:
            return EXIT_VERDICT
        return exit_code_after(exit_code, self._stopping.signum)

    def _watch_lives(self) -> int:
        """Watch one incarnation of the task after another; returns the exit code of the last."""
        for life in range(self._spec.restarts + 1):
            self._watch_task()
            exit_code = self._task.news.exit_code
            assert exit_code is not None, "the loop ends with the task"
            killed = exit_code < 0 and not self._by_monitor and not self._task.news.problem
            if not killed or life == self._spec.restarts:
                return exit_code
            self._say_why(exit_code)
            say(f"restarting {self._spec.task} ({life + 1} of {self._spec.restarts} restarts)")
            self._start_again()
        raise AssertionError("the last incarnation returns")

    def _start_again(self) -> None:
        finished = self._record.report.phase == TaskPhase.FINISHING.value
        self._task.close(REAPER_SECONDS)
        processes.end_descendants(0.0, REAPER_SECONDS)
        self._record.on_restarted()
        marks = (FINISHED, LATER) if finished else (LATER,)
        self._task = TaskProcess(self._spec.command, marks, takes_signals=self._spec.takes_signals)
        self._reports_open = True

    def _watch_task(self) -> None:
        while self._task.news.exit_code is None:
            ready = processes.wait_readable(self._descriptors(), self._seconds_to_wait())
            now = time.monotonic()
            self._observer.look()
            for signum in self._inbox.take():
                self._on_signal(signum, now)
            if self._stopping.on_time(now) is Action.KILL:
                say(f"{self._spec.task} did not end within {self._stopping.patience:g} s when asked to, and was killed")
                self._task.kill()
            if not self._forced and self._outlived.look(now):
                self._forced = True
                say(f"{self._spec.task} hangs although its job has ended, and was killed")
                self._task.kill()
            if self._task.report_fd in ready:
                self._take_reports()
            if not ready and not self._reports_open:
                self._record.on_cut_off()  # not at once: a process that ends closes its descriptors first
            if self._task.status_fd in ready:
                self._take_status()
        if self._reports_open:
            self._take_reports()  # the last reports, which may have arrived together with the exit

    @property
    def _by_monitor(self) -> bool:
        """Whether this monitor itself has ended the task, or was asked to."""
        return self._forced or self._stopping.signum is not None

    def _descriptors(self) -> set[int]:
        watched = {self._inbox.fileno(), self._task.status_fd}
        if self._reports_open:
            watched.add(self._task.report_fd)
        return watched

    def _seconds_to_wait(self) -> float:
        deadline = self._stopping.next_deadline()
        return TICK_SECONDS if deadline is None else min(TICK_SECONDS, deadline - time.monotonic())

    def _on_signal(self, signum: int, now: float) -> None:
        if signum == signal.SIGUSR1:
            if not self._task.ask_for_files():
                say(f"{self._spec.task} does not write files on request")
            return
        match self._stopping.on_signal(signum, now):
            case Action.ASK:
                self._record.on_signal(signum)
                self._task.ask_to_end(signum)
            case Action.KILL:
                self._task.kill()

    def _take_status(self) -> None:
        pid = self._task.news.pid
        news = self._task.read_status()
        if news.pid != pid:
            self._record.on_started(news.pid)

    def _take_reports(self) -> None:
        reports, self._reports_open = self._task.read_reports()
        for report in reports:
            self._record.on_report(report)

    def _say_why(self, exit_code: int) -> None:
        if self._task.news.problem:
            say(f"{self._spec.task}: {self._task.news.problem}")
        elif exit_code < 0 and not self._by_monitor:
            say(self._observer.death(exit_code))

    def _leave_nothing(self) -> None:
        self._task.close(REAPER_SECONDS)
        left = [facts.pid for facts in processes.end_descendants(0.0, REAPER_SECONDS)]
        stuck = sorted({*left, *self._task.news.stuck})
        if stuck:
            pids = ", ".join(map(str, stuck))
            say(f"processes that {self._spec.task} started cannot be killed (they hang in the kernel): pid {pids}")
