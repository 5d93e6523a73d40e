"""The lives of one task: its parent starts it, watches it, and starts it again after a loss.

A monitor (``monitor.py``) and ``lockstep run`` (``runner.py``) are both this one loop over descriptors: signals from
outside, the reaper's status lines, the task's own reports.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Final

from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.timing import REAPER_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.monitor.exit import Action, Stopping, TaskObserver
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.spares import Spares
from lockstep.runtime.monitor.task_process import NO_FORMER_LIFE, FormerLife, TaskProcess
from lockstep.terminal import say

TICK_SECONDS: Final = 0.5


class Lives(ABC):
    """Starts a task, watches it, and starts it again. What is special about the task is in the subclass."""

    _task: TaskProcess

    def __init__(
        self,
        name: str,
        record: TaskRecord,
        inbox: processes.SignalInbox,
        stopping: Stopping,
        restarts: int,
        spares: Spares | None = None,
    ) -> None:
        self._name = name
        self._record = record
        self._inbox = inbox
        self._stopping = stopping
        self._restarts = restarts
        self._observer = TaskObserver(name, record)
        self._reports_open = True
        self._former = NO_FORMER_LIFE
        self._spares = Spares() if spares is None else spares

    @abstractmethod
    def _start(self, former: FormerLife) -> TaskProcess:
        """Start the process. ``former``: what it is told of those before it."""

    @abstractmethod
    def _pass_on(self, signum: int) -> None:
        """A signal that does not ask for the end."""

    @abstractmethod
    def _look(self, now: float, ready: set[int]) -> None:
        """Called often, with the descriptors that have something to read."""

    def _may_return(self) -> bool:
        """Whether a task that was just lost can be started again at all."""
        return True

    def _goes_back(self) -> bool:
        """Whether the task, which has ended, is to be started again because another one was lost."""
        return False

    def _others_watched(self) -> set[int]:
        """Further descriptors to wait for, for ``_look``."""
        return set()

    @property
    def _by_monitor(self) -> bool:
        """Whether this process itself has ended the task, or was asked to."""
        return self._stopping.signum is not None

    def _begin(self) -> None:
        """Start the first incarnation."""
        self._task = self._start(NO_FORMER_LIFE)

    def _watch_lives(self) -> int:
        """Watch one incarnation of the task after another; returns the exit code of the last."""
        try:
            return self._watch_one_by_one()
        finally:
            self._spares.close()  # before anything lingers

    def _watch_one_by_one(self) -> int:
        restarts = 0
        while True:
            self._watch_task()
            exit_code = self._task.news.exit_code
            assert exit_code is not None, "the loop ends with the task"
            if self._by_monitor or self._task.news.problem:
                return exit_code
            if self._goes_back():
                say(f"starting {self._name} again: its job goes back to the newest checkpoint")
            elif is_loss(exit_code) and restarts < self._restarts and self._may_return():
                restarts += 1
                self._say_why(exit_code)
                say(f"restarting {self._name} ({restarts} of {self._restarts} restarts)")
            else:
                return exit_code
            self._start_again()

    def _tell_of_next_life(self) -> None:
        """The former incarnation is over."""
        self._record.on_restarted()

    def _tell_of_process(self, pid: int) -> None:
        self._record.on_started(pid)

    def _start_again(self) -> None:
        report = self._record.report
        finished = report.phase == TaskPhase.FINISHING.value
        self._former = FormerLife(finished=finished, exists=True, job=report.job or self._former.job)
        self._tell_of_next_life()
        self._task.close(REAPER_SECONDS)
        processes.end_descendants(0.0, REAPER_SECONDS, self._spares.reapers())
        self._task = self._start(self._former)
        self._reports_open = True
        if self._task.news.pid:  # it was a spare, and runs already
            say(f"a spare takes the place of {self._name} (pid {self._task.news.pid})")
            self._tell_of_process(self._task.news.pid)

    def _watch_task(self) -> None:
        while self._task.news.exit_code is None:
            ready = processes.wait_readable(self._descriptors(), self._seconds_to_wait())
            now = time.monotonic()
            self._spares.look(now, ready)
            self._observer.look()
            for signum in self._inbox.take():
                self._on_signal(signum, now)
            if self._stopping.on_time(now) is Action.KILL:
                say(f"{self._name} did not end within {self._stopping.patience:g} s when asked to, and was killed")
                self._task.kill()
            self._look(now, ready)
            if self._task.report_fd in ready:
                self._take_reports()
            if not ready and not self._reports_open:
                self._record.on_cut_off()  # not at once: a process that ends closes its descriptors first
            if self._task.status_fd in ready:
                self._take_status()
        if self._reports_open:
            self._take_reports()  # the last reports, which may have arrived together with the exit

    def _descriptors(self) -> set[int]:
        watched = {self._inbox.fileno(), self._task.status_fd, *self._others_watched(), *self._spares.descriptors()}
        if self._reports_open:
            watched.add(self._task.report_fd)
        return watched

    def _seconds_to_wait(self) -> float:
        deadline = self._stopping.next_deadline()
        return TICK_SECONDS if deadline is None else min(TICK_SECONDS, deadline - time.monotonic())

    def _on_signal(self, signum: int, now: float) -> None:
        if signum not in processes.STOP_SIGNALS:
            self._pass_on(signum)
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
            self._tell_of_process(news.pid)

    def _take_reports(self) -> None:
        reports, self._reports_open = self._task.read_reports()
        for report in reports:
            self._record.on_report(report)

    def _say_why(self, exit_code: int) -> None:
        if self._task.news.problem:
            say(f"{self._name}: {self._task.news.problem}")
        elif exit_code < 0 and not self._by_monitor:
            say(self._observer.death(exit_code))

    def _leave_nothing(self) -> None:
        self._task.close(REAPER_SECONDS)
        left = [facts.pid for facts in processes.end_descendants(0.0, REAPER_SECONDS)]
        stuck = sorted({*left, *self._task.news.stuck})
        if stuck:
            pids = ", ".join(map(str, stuck))
            say(f"processes that {self._name} started cannot be killed (they hang in the kernel): pid {pids}")


def is_loss(exit_code: int) -> bool:
    """Whether a task that ended so was lost: a signal killed it that is no request to end. An error is no loss: the
    next incarnation would make it again."""
    return exit_code < 0 and -exit_code not in processes.STOP_SIGNALS
