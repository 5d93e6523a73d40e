"""A monitor for your own script: the task starts it when it joins, not the other way round.

The sidecar is a child of the task. It listens at the task's address, reads its reports, and answers for it. It sees
the task's death through a process descriptor, and learns how the task died from the kernel if that is possible for
processes other than the parent (Linux 6.15 and newer, or while the dead process is not yet reaped). It ends soon after
the task, or with the job.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from lockstep.errors import BadInput
from lockstep.foreign import read_json
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.timing import (
    ASK_SECONDS,
    FORMER_SECONDS,
    LINGER_SECONDS,
    SIDECAR_CLOSE_SECONDS,
    STOP_SECONDS,
)
from lockstep.runtime import processes
from lockstep.runtime.monitor.exit import TaskObserver, linger
from lockstep.runtime.monitor.metrics_server import exporting
from lockstep.runtime.monitor.monitor import why_not_listening
from lockstep.runtime.monitor.outlived import Outlived, has_left
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import ReportReader, TaskReporter
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.running_jobs import listed
from lockstep.runtime.startup.metrics_options import NO_METRICS, MetricsOptions
from lockstep.terminal import drop_what_cannot_be_written, say
from lockstep.transports.control.monitor_client import Unreachable, describe
from lockstep.transports.control.server import ListenError, PortTaken

UNKNOWN_EXIT_CODE: Final = 255
"""Reported for a task that ended without reporting its code, on a system where only its parent learns it."""

START_SECONDS: Final = 30.0
"""A sidecar listens after a fraction of a second; on a machine that is starting a hundred of them it takes longer."""

_RETRY_SECONDS: Final = 0.1
_TICK_SECONDS: Final = 0.5
_EXIT_STATUS_SECONDS: Final = 0.5

_PIDFD_GET_INFO: Final = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT: Final = 1 << 3


class SidecarError(Exception):
    """The sidecar cannot do its work; the text is one plain sentence with a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSpec:
    """Which task to answer for, and where."""

    task: str
    host: str
    port: int
    version: str
    cluster: Mapping[str, str] = field(default_factory=dict)
    """Every task of the cluster with its address, so that anyone who finds this sidecar finds the others too."""
    linger_seconds: float = LINGER_SECONDS
    metrics_port: str = ""
    metrics_file: str = ""


class Sidecar:
    """The task's handle on its sidecar. Report through ``reporter``; call ``close`` when the job has ended."""

    def __init__(self, process: subprocess.Popen[bytes], reporter: TaskReporter) -> None:
        self._process = process
        self.reporter = reporter

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, exit_code: int = 0) -> None:
        """Report how the job ended for this task, and wait for the sidecar to end. May be called twice."""
        self.reporter.ended(exit_code)
        self.reporter.close()
        try:
            self._process.wait(SIDECAR_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0 if kind is None else 1)


def start_sidecar(
    task: TaskId,
    host: str,
    port: int,
    version: str,
    linger_seconds: float = LINGER_SECONDS,
    cluster: tuple[tuple[str, str], ...] = (),
    metrics: MetricsOptions = NO_METRICS,
) -> Sidecar:
    """Start a sidecar for this process; returns once it listens. Raises ``SidecarError``."""
    spec = SidecarSpec(
        task=str(task),
        host=host,
        port=port,
        version=version,
        linger_seconds=linger_seconds,
        cluster=dict(cluster),
        metrics_port=metrics.port,
        metrics_file=metrics.file,
    )
    report_reader, report_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    code = (
        "import sys; sys.path.append(sys.argv[1]); "
        "from lockstep.runtime.monitor.sidecar import main; sys.exit(main(sys.argv[2:]))"
    )
    root = str(Path(__file__).resolve().parents[3])
    arguments = [root, str(os.getpid()), str(report_reader), str(ready_writer), json.dumps(asdict(spec))]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(report_reader, ready_writer),
            start_new_session=True,
        )
    finally:
        os.close(report_reader)
        os.close(ready_writer)
    reporter = TaskReporter(report_writer)
    problem = _wait_until_ready(ready_reader)
    if problem:
        process.kill()
        process.wait()
        reporter.close()
        raise SidecarError(problem)
    processes.let_read_stacks(process.pid)
    return Sidecar(process, reporter)


def _wait_until_ready(reader: int) -> str:
    """Why the sidecar cannot listen; empty if it does."""
    try:
        os.set_blocking(reader, False)
        if not processes.wait_readable({reader}, START_SECONDS):
            return f"the sidecar process did not start within {START_SECONDS:g} s; is the machine overloaded?"
        said = processes.read_available(reader)
    finally:
        os.close(reader)
    if said is None:
        return "the sidecar process ended before it listened; its error is in the lines above"
    return said.decode(errors="replace").strip().removeprefix("ready")


def main(arguments: Sequence[str]) -> int:
    """The sidecar process. Arguments: the task's pid, the descriptors for reports and for "ready", the spec."""
    task_pid, report_reader, ready_writer = (int(text) for text in arguments[:3])
    spec = SidecarSpec(**read_json(arguments[3]))
    drop_what_cannot_be_written()
    # Batch systems signal every process of a job. This one must run until it has reported the end.
    with processes.SignalInbox((*processes.STOP_SIGNALS, signal.SIGUSR1), until_exit=True) as inbox:
        record = TaskRecord(spec.task, spec.version, os.getpid(), tuple(spec.cluster.items()))
        record.on_started(task_pid)
        try:
            service = _listen(spec, record)
        except ListenError as error:
            os.write(ready_writer, why_not_listening(TaskId.parse(spec.task), spec.port, error).encode())
            return 0
        try:
            metrics = MetricsOptions(spec.metrics_port, spec.metrics_file)
            with exporting(metrics, record, tuple(spec.cluster.items())):
                os.write(ready_writer, b"ready\n")
                os.close(ready_writer)
                with listed(spec.task, service.address, spec.cluster, task_pid):
                    _Sidecar(spec, record, inbox, task_pid, report_reader).run()
        except BadInput as bad:
            os.write(ready_writer, " ".join(bad.sentences).encode())
        finally:
            service.close()
    return 0


def _listen(spec: SidecarSpec, record: TaskRecord) -> MonitorService:
    """The sidecar of this task's former incarnation may still answer there; it is gone within seconds."""
    deadline = time.monotonic() + FORMER_SECONDS
    silent = 0
    while True:
        try:
            return MonitorService(spec.host, spec.port, record)
        except PortTaken:
            former = _is_of_a_former_life(spec)
            silent += former is None
            # One that does not answer may have released the port meanwhile; the next attempt shows.
            if former is False or silent > 1 or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _is_of_a_former_life(spec: SidecarSpec) -> bool | None:
    """Whether the listener there answers for this very task, whose process has ended; None if nothing answers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.host, spec.host)
    try:
        found = describe(f"[{host}]:{spec.port}" if ":" in host else f"{host}:{spec.port}", ASK_SECONDS)
    except Unreachable:
        return None
    facts = processes.process_facts(found.pid)
    ended = found.exited or facts is None or facts.dead
    return found.task == spec.task and ended


class _Sidecar:
    """The loop, from the first report to the end of the linger."""

    def __init__(
        self, spec: SidecarSpec, record: TaskRecord, inbox: processes.SignalInbox, task_pid: int, report_fd: int
    ) -> None:
        self._spec = spec
        self._record = record
        self._inbox = inbox
        self._task_pid = task_pid
        self._report_fd = report_fd
        self._reports = ReportReader(report_fd)
        self._observer = TaskObserver(spec.task, record)
        self._outlived = Outlived(TaskId.parse(spec.task), record, tuple(spec.cluster.items()), has_left)
        self._reports_open = True
        self._forced = False

    def run(self) -> None:
        pidfd = os.pidfd_open(self._task_pid) if os.getppid() == self._task_pid else None
        died = pidfd is None or os.getppid() != self._task_pid
        while not died and self._record.report.exit_code is None:
            assert pidfd is not None
            watched = {pidfd, self._inbox.fileno()} | ({self._report_fd} if self._reports_open else set())
            ready = processes.wait_readable(watched, _TICK_SECONDS)
            self._observer.look()
            self._inbox.take()
            if self._report_fd in ready:
                self._take_reports()
            died = pidfd in ready
            if not died and self._outlived.look(time.monotonic()):
                self._forced = True
                say(f"{self._spec.task} hangs although its job has ended, and was killed")
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                self._await_death(pidfd)
                died = True
            if not ready and not self._reports_open:
                self._record.on_cut_off()  # not at once: a process that ends closes its descriptors first
        self._take_reports()
        self._tell_end(pidfd)

    def _await_death(self, pidfd: int) -> None:
        """Bounded: a process in a system call that does not return stays for as long as that lasts."""
        processes.wait_readable({pidfd}, STOP_SECONDS)

    def _take_reports(self) -> None:
        """A report with an exit code means that the task has finished with the job; their end alone does not: a
        program may close all descriptors, and goes on."""
        if not self._reports_open:
            return
        reports, self._reports_open = self._reports.read()
        for report in reports:
            self._record.on_report(report)

    def _tell_end(self, pidfd: int | None) -> None:
        exit_code = self._record.report.exit_code
        if exit_code is None:
            exit_code = _exit_code_of_the_dead(self._task_pid, pidfd)
        if exit_code < 0 and not self._forced:
            say(self._observer.death(exit_code))
        number = self._observer.ended(exit_code)
        linger(self._record, number, exit_code == 0, self._spec.linger_seconds, inbox=None)


def _exit_code_of_the_dead(pid: int, pidfd: int | None) -> int:
    """How a process that is not our child ended, as far as the kernel shows: at once, or once it has been reaped."""
    deadline = time.monotonic() + _EXIT_STATUS_SECONDS
    while True:
        status = _status_of_zombie(pid)
        if status is None and pidfd is not None:
            status = _status_from_pidfd(pidfd)
        if status is not None:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return UNKNOWN_EXIT_CODE
        time.sleep(0.01)


def _status_of_zombie(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] == "Z" else None


def _status_from_pidfd(pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None  # an older kernel
    mask: int = struct.unpack_from("<Q", info, 0)[0]
    status: int = struct.unpack_from("<i", info, 60)[0]
    return status if mask & _PIDFD_INFO_EXIT else None
