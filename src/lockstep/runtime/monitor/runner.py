"""``lockstep run``: the monitor as the parent of any program, which a launcher starts instead of it.

The program says in ``lockstep.join`` which task it is (``door.py``); from then on this process answers at the task's
address, over all its lives. A program that never joins a job is only started, watched and started again. Nothing that
it started outlives this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final

from lockstep.errors import EXIT_BAD_INPUT, BadInput
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.timing import (
    ANSWERED_FOR_SECONDS,
    GRACE_SECONDS,
    LINGER_SECONDS,
    OVERSTAY_SECONDS,
    STOP_SECONDS,
)
from lockstep.runtime import processes
from lockstep.runtime.monitor.door import Introduction, RunDoor
from lockstep.runtime.monitor.exit import Stopping, TaskObserver, linger
from lockstep.runtime.monitor.lives import Lives
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport
from lockstep.runtime.monitor.spares import SparePlan, SparePool
from lockstep.runtime.monitor.task_process import FormerLife, TaskProcess
from lockstep.runtime.startup.metrics_options import NO_METRICS, MetricsOptions
from lockstep.security.chosen import choose, settle
from lockstep.terminal import say
from lockstep.transports.control.ports import PortRange, ReservedPort
from lockstep.version import __version__

PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)
_OTHER_VERSION: Final = (
    f"this program uses another version of Lockstep than the 'lockstep run' that started it ({__version__}); install "
    "the same one for both."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What to run, and how often again."""

    command: tuple[str, ...]
    restarts: int
    metrics: MetricsOptions = NO_METRICS
    """What the program gives to ``lockstep.join`` comes first."""
    linger_seconds: float = LINGER_SECONDS
    spares: SparePlan | None = None


def run_program(spec: RunSpec) -> int:
    """Run the program to its end; returns the exit code to use. Call it as ``run_monitor``."""
    with (
        processes.SignalInbox((*processes.STOP_SIGNALS, *PASSED_ON), until_exit=True) as inbox,
        contextlib.ExitStack() as open_until_end,
    ):
        processes.become_subreaper()
        return _Runner(spec, inbox, open_until_end).run()


def exit_code_of(program: int, asked: int | None) -> int:
    """The program's own code; 128 plus the signal that killed it, or that asked for the end it was killed for."""
    if program >= 0:
        return program
    return 128 + (-program if asked is None else asked)


class _Runner(Lives):
    """The loop, from the start of the program to the end of the linger."""

    def __init__(self, spec: RunSpec, inbox: processes.SignalInbox, open_until_end: contextlib.ExitStack) -> None:
        name = os.path.basename(spec.command[0])
        record = TaskRecord(name, __version__, os.getpid())
        spares = None if spec.spares is None else SparePool(spec.spares)
        super().__init__(name, record, inbox, Stopping(GRACE_SECONDS + STOP_SECONDS), spec.restarts, spares)
        self._spec = spec
        self._open = open_until_end
        self._among_running = open_until_end.enter_context(contextlib.ExitStack())
        self._door: RunDoor | None = None
        self._greeted = False
        self._reserved: ReservedPort | None = None
        self._hosts: list[str] = []
        self._known: Introduction | None = None
        self._job_over = False
        self._back_at: float | None = None
        """Since when this life is over for its job, which goes back."""
        self._shown_from: float | None = None
        """From when on the others see the life after one that was lost; None: they see the present one."""

    def run(self) -> int:
        self._begin()
        try:
            exit_code = self._watch_lives()
            self._say_why(exit_code)
            if self._known is not None:
                # If it has left its job before, its end is no news for the others.
                number = self._record.changed.number if self._job_over else self._observer.ended(exit_code)
                quiet = exit_code == 0 or self._by_monitor or self._job_over or bool(self._record.report.leaving)
                linger(self._record, number, quiet, self._spec.linger_seconds, self._inbox)
        finally:
            self._leave_nothing()
            self._close_door()
        if self._task.news.problem:
            return EXIT_BAD_INPUT
        return exit_code_of(exit_code, self._stopping.signum)

    # -- what is special about it --

    def _start(self, former: FormerLife) -> TaskProcess:
        self._back_at = None
        self._close_door()
        self._greeted = False
        placed = self._spares.place(self._spec.command) if former.exists else None
        if placed is not None:
            self._door = placed.door
            return placed.process
        self._door = RunDoor()
        return TaskProcess(self._spec.command, door=self._door)

    def _pass_on(self, signum: int) -> None:
        if processes.catches(self._task.news.pid, signum):
            self._task.pass_on(signum)
        else:
            say(f"{self._name} does not handle {processes.signal_name(signum)} now, and would be killed by it")

    def _may_return(self) -> bool:
        report = self._record.report
        needed = self._known is not None and self._known.holds_buckets
        if self._job_over or report.over or (report.phase == TaskPhase.FINISHING.value and not needed):
            say(f"{self._name} is not restarted: it had done its part of the job")
            return False
        if self._known is not None and not self._known.takes_back:
            say(f"{self._name} is not restarted: this job does not go on after its loss (docs/recovery.md)")
            return False
        return True

    def _tell_of_next_life(self) -> None:
        """After a loss, first how it ended: until the next life has imported torch, nothing else would prove it."""
        exit_code = self._task.news.exit_code
        if self._back_at is not None or exit_code is None:
            self._record.on_restarted()
            return
        self._observer.ended(exit_code)
        self._shown_from = time.monotonic() + ANSWERED_FOR_SECONDS

    def _tell_of_process(self, pid: int) -> None:
        if self._shown_from is None:
            self._record.on_started(pid)

    def _show_next_life(self) -> None:
        if self._shown_from is None:
            return
        self._shown_from = None
        self._record.on_restarted()
        if self._task.news.pid:
            self._record.on_started(self._task.news.pid)

    def _goes_back(self) -> bool:
        return self._back_at is not None

    def _take_reports(self) -> None:
        reports, self._reports_open = self._task.read_reports()
        for report in reports:
            self._take_report(report)

    def _take_report(self, report: TaskReport) -> None:
        if self._back_at is not None:
            return  # for the others, the next life has begun
        self._record.on_report(report)
        if report.goes_back:
            self._back_at = time.monotonic()
            self._record.on_restarted()
        elif report.exit_code is not None and not self._job_over:
            self._job_over = True
            self._observer.ended(report.exit_code)
            self._among_running.close()

    # -- the door --

    def _others_watched(self) -> set[int]:
        return set() if self._door is None else {self._door.host.fileno()}

    def _look(self, now: float, ready: set[int]) -> None:
        if self._shown_from is not None and now >= self._shown_from:
            self._show_next_life()
        if self._back_at is not None and now - self._back_at >= OVERSTAY_SECONDS:
            self._back_at = float("inf")
            say(f"{self._name} stays although its job goes back to the newest checkpoint, and was killed")
            self._task.kill()
        if self._door is None or self._door.host.fileno() not in ready:
            return
        said = self._door.take()
        if said is None:
            return
        if not said:
            self._close_door()  # the program has closed its end
            return
        try:
            self._door.answer(**self._answer(said))
        except BadInput as bad:
            self._door.answer(problem=" ".join(bad.sentences))
        except (AttributeError, KeyError, TypeError, ValueError):
            self._door.answer(problem=_OTHER_VERSION)

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
        self._door = None

    def _answer(self, said: dict[str, Any]) -> dict[str, object]:
        match said:
            case {"hello": True}:
                self._show_next_life()
                taken, self._greeted = self._greeted or self._job_over, True
                former = {"later": self._former.exists, "finished": self._former.finished, "job": self._former.job}
                return {"taken": taken, "restarts": self._spec.restarts, "hosts": self._hosts, **former}
            case {"reserve": among}:
                return {"port": self._reserve(among)}
            case {"hosts": list(hosts)}:
                self._hosts = [str(host) for host in hosts]
                return {"noted": True}
            case {"patience": float(seconds) | int(seconds)}:
                self._stopping.patience_from_now(float(seconds))
                return {"noted": True}
            case {"introduction": dict(fields)}:
                cluster = tuple((str(name), str(address)) for name, address in fields.pop("cluster"))
                self._introduced(Introduction(**fields, cluster=cluster))
                return {"ready": True}
        return {"problem": _OTHER_VERSION}

    def _reserve(self, among: list[Any] | None) -> int:
        if self._reserved is None:
            ports = None if among is None else PortRange(among[0], among[1], frozenset(among[2]))
            self._reserved = self._open.enter_context(ReservedPort("", ports))
        return self._reserved.port

    def _introduced(self, given: Introduction) -> None:
        """The program is this task: answer for it. A later life must be the same one."""
        if self._known is None:
            self._listen(given)
        elif (self._known.task, self._known.cluster) != (given.task, given.cluster):
            raise BadInput(
                f"this program was {self._known.task} before it was lost and is {given.task} of another cluster now; "
                "'lockstep run' keeps one task: let the program choose the same task in every life."
            )
        self._known = given
        self._stopping.patience_from_now(given.grace + STOP_SECONDS)

    def _listen(self, given: Introduction) -> None:
        # Only now: the program has been started before gRPC is imported, and many never join.
        from lockstep.protocol.core.ids import TaskId
        from lockstep.runtime.monitor.metrics_server import exporting
        from lockstep.runtime.monitor.monitor import why_not_listening
        from lockstep.runtime.monitor.service import MonitorService
        from lockstep.runtime.running_jobs import listed
        from lockstep.transports.control.server import ListenError

        choose(given.key_file, given.insecure)
        settle(lambda _line: None)  # the program has said it
        self._record.introduce(given.task, given.version, given.cluster)
        try:
            service = MonitorService(given.host, given.port, self._record)
        except ListenError as error:
            raise BadInput(why_not_listening(TaskId.parse(given.task), given.port, error)) from None
        self._open.callback(service.close)
        here = self._spec.metrics
        metrics = MetricsOptions(given.metrics_port or here.port, given.metrics_file or here.file)
        self._open.enter_context(exporting(metrics, self._record, given.cluster))
        if self._reserved is not None:
            self._reserved.close()  # it listens there now
        running = listed(given.task, service.address, dict(given.cluster), os.getpid())
        self._among_running.enter_context(running)
        self._name = given.task
        self._observer = TaskObserver(given.task, self._record)
