"""How a task reports its progress to its monitor: lines of JSON on a pipe that it inherited.

Each line carries the whole state, so the next line makes up for a lost one. The task never waits for its monitor: if
the pipe is full (the monitor is frozen), the line is dropped, and the next one carries its contents.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, replace
from typing import Final

from lockstep.foreign import read_json
from lockstep.protocol.core.activity import TaskPhase
from lockstep.runtime.processes import read_available

MAX_LINE_BYTES: Final = 4096
"""A write of this size to a pipe happens whole or not at all (PIPE_BUF on Linux)."""

MAX_TEXT: Final = 300
"""Two texts of this length fit in a line even if each character takes six bytes, the most that JSON needs for one."""


MAX_REASON: Final = 240
"""Its characters take one byte each, so it fits beside the two texts."""


MAX_LEAVER: Final = 60
"""The name of a task."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What a task has reported so far. Only a task whose monitor is a sidecar reports ``exit_code``."""

    phase: str = TaskPhase.STARTING.value
    task_address: str = ""
    incarnation: int = 0
    job: int = 0
    exit_code: int | None = None
    reason: str = ""
    """Why the job failed for it, for tasks that ask later."""
    leaver: str = ""
    leaving: int = 0
    """Which task received which signal, if that ends the job."""
    printed: int = 0
    """How many whole reports it has printed."""
    over: bool = False
    """The job has ended here."""
    must_leave: bool = False
    """It ended badly, and nothing is left to do."""
    goes_back: bool = False
    """The job goes back to its newest checkpoint, with another incarnation of this task."""


def plain_reason(reason: str) -> str:
    """The same text in characters that take one byte each in a line."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "'" for c in reason)
    return plain[:MAX_REASON]


def encode_report(report: TaskReport) -> bytes:
    """One line. Long texts are truncated so that it always fits."""
    fields = {
        "phase": report.phase[:MAX_TEXT],
        "task_address": report.task_address[:MAX_TEXT],
        "incarnation": f"{report.incarnation:016x}",
        "job": f"{report.job:016x}",
        "exit_code": report.exit_code,
        "reason": report.reason,
        "leaver": report.leaver,
        "leaving": report.leaving,
        "printed": report.printed,
        "over": report.over,
        "must_leave": report.must_leave,
        "goes_back": report.goes_back,
    }
    return json.dumps(fields, ensure_ascii=False).encode(errors="replace") + b"\n"


def decode_report(line: bytes) -> TaskReport | None:
    """Read a line back; None for anything else (a library's stray write to the descriptor)."""
    try:
        fields = read_json(line, MAX_LINE_BYTES)
        exit_code = fields["exit_code"]
        return TaskReport(
            phase=str(fields["phase"])[:MAX_TEXT],
            task_address=str(fields["task_address"])[:MAX_TEXT],
            incarnation=int(fields["incarnation"], 16) & (2**64 - 1),
            job=int(fields["job"], 16) & (2**64 - 1),
            exit_code=None if exit_code is None else int(exit_code),
            reason=str(fields.get("reason", ""))[:MAX_REASON],
            leaver=str(fields.get("leaver", ""))[:MAX_LEAVER],
            leaving=int(fields.get("leaving", 0)) & 0xFF,
            printed=int(fields.get("printed", 0)) & 0xFFFF,
            over=bool(fields.get("over", False)),
            must_leave=bool(fields.get("must_leave", False)),
            goes_back=bool(fields.get("goes_back", False)),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


class LineBuffer:
    """Assembles lines from the pieces read from a pipe, in bounded memory: an overlong line is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends."""
        *lines, rest = (self._pending + data).split(b"\n")
        if lines and self._skipping:
            lines.pop(0)
            self._skipping = False
        if len(rest) > self._limit or self._skipping:
            self._skipping, rest = True, b""
        self._pending = rest
        return [line for line in lines if len(line) <= self._limit]


class ReportReader:
    """The monitor's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines = LineBuffer(MAX_LINE_BYTES)
        os.set_blocking(fd, False)

    def read(self) -> tuple[list[TaskReport], bool]:
        """The task's reports since the last call, and whether more may come later."""
        data = read_available(self._fd, MAX_LINE_BYTES * 16)
        if data is None:
            return [], False
        reports = map(decode_report, self._lines.feed(data))
        return [report for report in reports if report is not None], True


class TaskReporter:
    """The task's end of the pipe. May be used from any thread; never blocks and never raises."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._report = TaskReport()
        self._lock = threading.Lock()
        if fd is not None:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)

    @classmethod
    def none(cls) -> TaskReporter:
        """For a task without a monitor: remembers its state and sends nothing."""
        return cls(None)

    @property
    def report(self) -> TaskReport:
        """The latest state."""
        return self._report

    def phase(self, phase: TaskPhase | str) -> None:
        """The task is now doing this."""
        self._tell(phase=str(phase))

    def phase_after(self, former: TaskPhase, phase: TaskPhase) -> None:
        """``former`` is over and the task is now doing this, unless another thread is already further."""
        if self._report.phase == str(former):
            self.phase(phase)

    def phase_unless_importing(self, phase: TaskPhase) -> None:
        """The cluster has got this far. A task that is importing torch is still doing that, and reports its end."""
        if self._report.phase != TaskPhase.IMPORTING_TORCH.value:
            self.phase(phase)

    def ready(self, task_address: str, incarnation: int, job: int = 0) -> None:
        """The task answers at ``task_address`` in this incarnation; ``job`` is 0 until it is known."""
        first = {"over": False, "must_leave": False, "goes_back": False}
        self._tell(task_address=task_address, incarnation=incarnation, job=job, **first)

    def over(self, *, must_leave: bool) -> None:
        """The job has ended here. ``must_leave``: badly, so that this task has nothing left to do."""
        self._tell(over=True, must_leave=must_leave or self._report.must_leave)

    def goes_back(self) -> None:
        """The job goes back to its newest checkpoint: this incarnation is over, and another one is to follow."""
        self._tell(goes_back=True)

    def beat(self) -> None:
        """The task still runs: report the same state again."""
        self._tell()

    def joined(self, job: int) -> None:
        """The task is a member of this job."""
        self._tell(job=job)

    def failed(self, reason: str) -> None:
        """The job failed here for this reason."""
        self._tell(reason=plain_reason(reason))

    def leaves(self, leaver: str, signum: int) -> None:
        """A task, this one or another, received a signal that ends the job."""
        self._tell(leaver=leaver[:MAX_LEAVER], leaving=signum)

    def printed(self) -> None:
        """A whole report is on this task's terminal."""
        self._tell(printed=self._report.printed + 1)

    def ended(self, exit_code: int) -> None:
        """The task ends with this code. Report it last, to a sidecar only (a parent sees it anyway)."""
        self._tell(phase=TaskPhase.ENDED.value, exit_code=exit_code)

    def close(self) -> None:
        """Report nothing more; for a script that continues after its job."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None

    def _tell(self, **changes: str | int) -> None:
        with self._lock:
            self._report = replace(self._report, **changes)  # type: ignore[arg-type]  # callers pass what fits the field
            if self._fd is None:
                return
            try:
                os.write(self._fd, encode_report(self._report))
            except OSError:
                return  # full, and the next line repeats everything; or the monitor is gone, and this task soon is too


__all__ = [
    "MAX_LINE_BYTES",
    "MAX_REASON",
    "MAX_TEXT",
    "LineBuffer",
    "ReportReader",
    "TaskReport",
    "TaskReporter",
    "decode_report",
    "encode_report",
    "plain_reason",
]
