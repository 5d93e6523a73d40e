"""What a monitor knows about its task, and who has received it."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import Final

from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import Incarnation
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.timing import WATCHER_GONE_SECONDS
from lockstep.runtime.monitor.reporter import TaskReport
from lockstep.transports.control.broadcast import Broadcast

_HISTORY: Final = 64


class ToldBroadcast(Broadcast):
    """A broadcast that knows whether all waiters have delivered the last change."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._watchers: dict[int, tuple[int, float]] = {}

    def wait(self, seen: int, seconds: float) -> int:
        """As in the base class; a waiter that passes ``seen`` has delivered everything up to that number."""
        with self._lock:
            self._watchers[threading.get_ident()] = (seen, time.monotonic())
        return super().wait(seen, seconds)

    def watchers(self) -> int:
        """How many are following the changes now."""
        return len(self._present())

    def everyone_has(self, number: int) -> bool:
        """Whether all watchers have delivered change ``number``."""
        return all(seen >= number for seen in self._present())

    def _present(self) -> list[int]:
        earliest = time.monotonic() - WATCHER_GONE_SECONDS
        with self._lock:
            return [seen for seen, entered in self._watchers.values() if entered >= earliest]


class TaskRecord:
    """What ``Describe``, ``Watch`` and ``Snapshot`` show. Written by the monitor's loop, read by gRPC's threads."""

    def __init__(self, task: str, version: str, monitor_pid: int, cluster: tuple[tuple[str, str], ...] = ()) -> None:
        self.cluster = cluster
        self.changed = ToldBroadcast()
        self._lock = threading.Lock()
        self._task = task
        self._version = version
        self._monitor_pid = monitor_pid
        self._host = socket.gethostname()
        self._pid = 0
        self.starts = 0
        """How often the task was started."""
        self._report = TaskReport()
        self._former: Incarnation = 0
        """The incarnation that ended last."""
        self._exit_code: int | None = None
        self._signum = 0
        self._since = time.monotonic()
        self._heard_at = self._since
        self._printed_at: float | None = None
        self._stopped_since: float | None = None
        self.out_of_memory: str | None = None
        """Evidence that the kernel killed the task for lack of memory; set by the monitor's loop after its end."""
        self._history: deque[tuple[str, float]] = deque([(TaskPhase.STARTING.value, self._since)], maxlen=_HISTORY)

    @property
    def pid(self) -> int:
        """The task's process; 0 before it was started."""
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """None while the task runs; negative if a signal killed it."""
        return self._exit_code

    @property
    def report(self) -> TaskReport:
        """The task's latest report."""
        return self._report

    def introduce(self, task: str, version: str, cluster: tuple[tuple[str, str], ...]) -> None:
        """The process has said which task it is."""
        with self._lock:
            self._task, self._version, self.cluster = task, version, cluster

    def on_started(self, pid: int) -> None:
        with self._lock:
            self._pid = pid
            self.starts += 1
        self.changed.notify()

    def on_report(self, report: TaskReport) -> None:
        with self._lock:
            self._heard_at = time.monotonic()
            if report == self._report:
                return  # a heartbeat, but no news for watchers
            self._enter(report.phase)
            if report.printed != self._report.printed:
                self._printed_at = self._heard_at
            self._report = report
        self.changed.notify()

    def on_cut_off(self) -> None:
        """The task has closed its end of the reports, and still runs."""
        with self._lock:
            if self._history[-1][0] == TaskPhase.CUT_OFF.value:
                return
            self._enter(TaskPhase.CUT_OFF.value)
        self.changed.notify()

    def on_signal(self, signum: int) -> None:
        """A signal asks this task to end."""
        with self._lock:
            self._signum = signum
        self.changed.notify()

    def on_state(self, *, stopped: bool) -> None:
        """Note whether the kernel shows the task as stopped."""
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()

    def stopped_seconds(self) -> float:
        """How long the task has been stopped; -1 if it is not."""
        since = self._stopped_since
        return -1.0 if since is None else time.monotonic() - since

    def silent_seconds(self) -> float:
        """How long ago the task last sent a heartbeat or a report."""
        return time.monotonic() - self._heard_at

    def on_exited(self, exit_code: int) -> int:
        """Returns the number of this change, to ask ``changed.everyone_has`` for."""
        with self._lock:
            self._exit_code = exit_code
            self._enter(TaskPhase.ENDED.value)
        self.changed.notify()
        return self.changed.number

    def on_restarted(self) -> None:
        """The task is about to be restarted: the end and the reports of its former incarnation no longer count."""
        with self._lock:
            self._pid = 0
            self._exit_code = None
            self.out_of_memory = None
            self._former = self._report.incarnation or self._former
            self._report = TaskReport()
            self._heard_at = time.monotonic()
            self._stopped_since = None
            self._enter(TaskPhase.STARTING.value)
        self.changed.notify()

    def _enter(self, phase: str) -> None:
        if phase != self._history[-1][0]:
            self._since = time.monotonic()
            self._history.append((phase, self._since))

    def describe(self) -> Description:
        with self._lock:
            return Description(
                task=self._task,
                host=self._host,
                monitor_pid=self._monitor_pid,
                pid=self._pid,
                incarnation=self._report.incarnation,
                phase=self._history[-1][0],
                phase_seconds=time.monotonic() - self._since,
                task_address=self._report.task_address,
                exited=self._exit_code is not None,
                exit_code=self._exit_code or 0,
                version=self._version,
                job=self._report.job,
                leaver=self._task if self._signum else self._report.leaver,
                leaving=self._signum or self._report.leaving,
                printed_seconds=0.0 if self._printed_at is None else time.monotonic() - self._printed_at,
                former=self._former,
            )

    def history(self) -> list[tuple[str, float]]:
        """The phases so far with the seconds since each began, the oldest first."""
        now = time.monotonic()
        with self._lock:
            return [(phase, now - since) for phase, since in self._history]
