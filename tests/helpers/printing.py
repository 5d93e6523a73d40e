"""A task that prints reports, with a terminal, links and a disk that record what they are given."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diagnose.faulty import frozen
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.verdict import Diagnosis
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.protocol.core.messages import Description, Report
from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.core.timing import PRINTED_AFTER_SECONDS, PRINTED_SECONDS
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.watch.printing import Printing
from lockstep.transports.control.monitor_client import Unreachable

SPEC = ClusterSpec(ps_hosts=("h:1",), worker_hosts=("h:2", "h:3", "h:4"), task=worker(2))
AT = {server(0): "h:1", worker(0): "h:2", worker(1): "h:3", worker(2): "h:4"}
FROZEN = analyse(frozen().evidence())
"""Worker 1 is stopped."""
LATE = PRINTED_SECONDS + PRINTED_AFTER_SECONDS + 0.1


def blaming(culprit: TaskId, cause: Cause = Cause.FROZEN) -> Diagnosis:
    assert FROZEN.verdict is not None
    return replace(FROZEN, verdict=replace(FROZEN.verdict, culprit=str(culprit), cause=cause))


class Recorded:
    """Stands in for the terminal, the links and the disk of one task."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.paged: list[ReportKind] = []

    def say_notice(self, _diagnosis: Diagnosis) -> None:
        self.printed.append("notice")

    def say_report(self, kind: ReportKind, _diagnosis: Diagnosis) -> None:
        self.printed.append(f"whole {kind}")

    def say_printed(self, _diagnosis: Diagnosis, printer: TaskId, copy: str) -> None:
        self.printed.append(f"line: {printer.short} has {copy}")

    def say_again(self, kind: ReportKind, _diagnosis: Diagnosis, _copy: str) -> None:
        self.printed.append(f"again {kind}")

    def tell_printed(self, kind: ReportKind, _diagnosis: Diagnosis, _peers: Mapping[TaskId, Any]) -> None:
        self.printed.append(f"told the others of {kind}")

    def write(self, _kind: ReportKind, _diagnosis: Diagnosis) -> str:
        return "copy"

    write_if_first = write

    def note(self, _kind: ReportKind, _diagnosis: Diagnosis) -> None: ...

    def say_where(self, _copy: str) -> None: ...

    def page(self, kind: ReportKind, _diagnosis: Diagnosis, copy: str) -> None:
        assert copy
        self.paged.append(kind)


class Linked:
    """The link with the coordinator."""

    linked = True


class Task:
    """One task of three workers and a server, and what the monitors of the others report."""

    def __init__(self, task: TaskId, monitors: Mapping[TaskId, dict[str, Any]] | None = None) -> None:
        self.task = task
        self.peers: dict[TaskId, Any] = {server(0): Linked()}
        self.cluster = replace(SPEC, task=task)
        self.coordinator = self.cluster.shape.coordinator
        self.shown = Recorded()
        self.told_monitor = 0
        self._monitors = {AT[task]: fields for task, fields in (monitors or {}).items()}
        self.printing = Printing(self, self.shown, self._ask)  # type: ignore[arg-type]  # records what it is given

    def report_printed(self) -> None:
        self.told_monitor += 1

    def _ask(self, address: str, _seconds: float) -> Description:
        if address not in self._monitors:
            raise Unreachable(address, Silence(Reach.REFUSED, "nothing is listening there"))
        fields = {"exited": False, "exit_code": 0, "printed_seconds": 0.0, **self._monitors[address]}
        return Description("", "h", 1, 2, 3, "training", 1.0, address, version="1", job=4, **fields)

    def later(self, seconds: float) -> list[str]:
        """What is printed once this much time has passed."""
        self.printing.settle(time.monotonic() + seconds)
        return self.shown.printed


def received(diagnosis: Diagnosis, kind: ReportKind = ReportKind.VERDICT) -> Report:
    return Report(kind, "", diagnosis.to_json())
