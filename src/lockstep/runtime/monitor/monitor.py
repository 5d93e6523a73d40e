"""The monitor: the small process that a person starts, with the task as its child.

``run_monitor`` listens at the task's address at once, then starts the task, and from then on is one loop over
descriptors: signals from outside, the reaper's status lines, the task's own reports. gRPC's threads only read the
record.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_VERDICT, BadInput
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.timing import LINGER_SECONDS, STOP_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.monitor.exit import Stopping, exit_code_after, linger
from lockstep.runtime.monitor.lives import Lives
from lockstep.runtime.monitor.metrics_server import exporting
from lockstep.runtime.monitor.outlived import Outlived, has_left
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.monitor.spares import SparePlan, SparePool, lent_spares
from lockstep.runtime.monitor.task_process import FormerLife, TaskProcess
from lockstep.runtime.running_jobs import listed
from lockstep.runtime.startup.metrics_options import NO_METRICS, MetricsOptions
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.terminal import say
from lockstep.transports.control.addresses import who_listens
from lockstep.transports.control.server import ListenError, PortTaken


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
    spares: SparePlan | None = None
    """Processes that this monitor keeps for a task that is restarted; without it, those that its launcher lends."""
    metrics: MetricsOptions = NO_METRICS


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
            with (
                exporting(spec.metrics, record, spec.cluster),
                listed(str(spec.task), service.address, dict(spec.cluster), os.getpid()),
            ):
                return _Monitor(spec, record, inbox).run()
        except BadInput as bad:
            for sentence in bad.sentences:
                say(sentence)
            return EXIT_BAD_INPUT
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


class _Monitor(Lives):
    """A task whose command this monitor knows, from its start to the end of the linger."""

    def __init__(self, spec: MonitorSpec, record: TaskRecord, inbox: processes.SignalInbox) -> None:
        after_term: dict[int, float] = {} if spec.grace is None else {signal.SIGTERM: spec.grace + spec.stop_seconds}
        stopping = Stopping(spec.stop_seconds, after_term)
        spares = lent_spares(os.environ) if spec.spares is None else SparePool(spec.spares)
        super().__init__(str(spec.task), record, inbox, stopping, spec.restarts, spares)
        self._spec = spec
        self._outlived = Outlived(spec.task, record, spec.cluster, has_left)
        self._forced = False

    def run(self) -> int:
        self._begin()
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

    def _start(self, former: FormerLife) -> TaskProcess:
        command = former.marked(self._spec.command)
        placed = self._spares.place(command) if former.exists else None
        if placed is not None:
            return placed.process
        return TaskProcess(command, takes_signals=self._spec.takes_signals)

    def _look(self, now: float, ready: set[int]) -> None:  # noqa: ARG002 - nothing else to read
        if not self._forced and self._outlived.look(now):
            self._forced = True
            say(f"{self._spec.task} hangs although its job has ended, and was killed")
            self._task.kill()

    def _pass_on(self, signum: int) -> None:  # noqa: ARG002 - it is SIGUSR1
        if not self._task.ask_for_files():
            say(f"{self._spec.task} does not write files on request")

    @property
    def _by_monitor(self) -> bool:
        return self._forced or self._stopping.signum is not None
