"""Decides which task prints a report: one task does, the others print one line.

The coordinator prints what it finds, and sends ``Printed``. A task that does not receive that in time prints the report
itself. Where the coordinator is silent, or there is none, the first living task of the cluster prints; the others ask
the monitors of those before them whether they have. So a report may come late or twice, but is never lost.

All of this runs on the watchdog's thread; only ``explains`` may be called from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from lockstep.diagnose.verdict import Diagnosis, ReportError, read_diagnosis
from lockstep.protocol.core.causes import WITH_FILES, Cause, ReportKind
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Description, Printed, Report
from lockstep.protocol.core.timing import (
    ASK_ALL_SECONDS,
    PRINTED_AFTER_SECONDS,
    PRINTED_SECONDS,
    VERDICT_AGAIN_SECONDS,
    VERDICT_SECONDS,
)
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.watch.reporting import Publisher
from lockstep.transports.control.monitor_client import describe

ASK_AGAIN_SECONDS = 0.25
MOST_ASKED = 3
"""In a large cluster a task asks only the first few before it: otherwise all would ask all."""

Key = tuple[Cause, str]
"""Of a fault: its cause and its culprit. Who waits for the culprit may change from look to look."""


class Printer(Protocol):
    """What is needed of a node."""

    task: TaskId
    peers: dict[TaskId, PeerKeeper]

    @property
    def cluster(self) -> ClusterSpec: ...

    @property
    def coordinator(self) -> TaskId: ...

    def report_printed(self) -> None:
        """Tell the monitor that a report is on this task's terminal."""


@dataclass(slots=True)
class _Unprinted:
    """A report that another task should print."""

    kind: ReportKind
    diagnosis: Diagnosis
    copy: str
    """Where this task has written it."""
    until: float
    """When this task prints it itself."""
    before: list[TaskId]
    """The tasks that may print it instead, in their order."""
    asks: bool
    """Ask their monitors; not while the coordinator is expected to send ``Printed``."""
    asked_at: float = 0.0

    @property
    def culprit(self) -> str:
        return "" if self.diagnosis.verdict is None else self.diagnosis.verdict.culprit


class Printing:
    """Prints the reports of one task, or one line for each that another task prints."""

    def __init__(
        self, node: Printer, publisher: Publisher, ask: Callable[[str, float], Description] = describe
    ) -> None:
        self._node = node
        self._publisher = publisher
        self._ask_monitor = ask
        self._unprinted: list[_Unprinted] = []
        self._printed: dict[Key, float] = {}
        """Faults whose report was printed, here or elsewhere, since the job last made progress; and when this task
        last printed a line about each."""
        self._heard_at = -VERDICT_SECONDS
        """When the coordinator last sent ``Printed``."""
        self._culprits: set[str] = set()

    @property
    def pending(self) -> bool:
        return bool(self._unprinted)

    def explains(self, outcome: Outcome) -> bool:
        """Whether a report of this task tells why the job ended like this."""
        plain = outcome.departure is None and not (outcome.ok or outcome.again or outcome.alone)
        return plain and outcome.culprit in self._culprits

    def will_explain(self, culprit: str) -> None:
        """A report about this task is about to come; may be called from another thread."""
        self._culprits.add(culprit)

    def forget(self) -> None:
        """The job goes on: the next report is about something new."""
        self._printed.clear()

    # -- reports --

    def found(self, kind: ReportKind, diagnosis: Diagnosis, *, brief: bool = False) -> None:
        """This task has found something out. ``brief``: most likely others have reported what it follows from."""
        if diagnosis.verdict is not None:
            self._culprits.add(diagnosis.verdict.culprit)
        if brief:
            copy = self._publisher.write_if_first(kind, diagnosis)
            self._publisher.note(kind, diagnosis)
            self._publisher.say_again(kind, diagnosis, copy)
            return
        before, known = self._before(diagnosis), _key(diagnosis) in self._printed
        if not before and not known:
            self._print(kind, diagnosis)
        copy = self._publisher.write(kind, diagnosis)
        # After the files: a reader who finds it among the events finds them.
        self._publisher.note(kind, diagnosis)
        now = time.monotonic()
        if known:
            self._say_again(kind, diagnosis, copy)
            self._tell_printed(kind, diagnosis)
        elif not before:
            self._publisher.say_where(copy)
            self._publisher.page(kind, diagnosis, copy)
        elif now - self._heard_at < VERDICT_SECONDS:
            self._printed[_key(diagnosis)] = now
            self._publisher.say_printed(diagnosis, self._node.coordinator, copy)
        else:
            until = now + PRINTED_SECONDS + (PRINTED_AFTER_SECONDS if len(before) > 1 else 0.0)
            self._unprinted.append(_Unprinted(kind, diagnosis, copy, until, before, asks=True))

    def told(self, report: Report) -> Diagnosis | None:
        """The coordinator has found something out; None if that cannot be read."""
        try:
            diagnosis = read_diagnosis(report.diagnosis)
        except ReportError as error:
            self._publisher.say_problem(error)
            return None
        if report.kind not in WITH_FILES:
            self._publisher.say_notice(diagnosis)
            return diagnosis
        if diagnosis.verdict is not None:
            self._culprits.add(diagnosis.verdict.culprit)
        copy = self._publisher.write(report.kind, diagnosis)
        if _key(diagnosis) in self._printed:
            self._say_again(report.kind, diagnosis, copy)
            return diagnosis
        coordinator, until = self._node.coordinator, time.monotonic() + PRINTED_SECONDS
        self._unprinted.append(_Unprinted(report.kind, diagnosis, copy, until, [coordinator], asks=False))
        return diagnosis

    def heard_printed(self, printed: Printed) -> None:
        """The coordinator has printed a report."""
        self._heard_at = time.monotonic()
        for one in [one for one in self._unprinted if one.asks or one.culprit == printed.culprit]:
            self._leave_to(one, self._node.coordinator)

    def settle(self, now: float) -> None:
        """Print what nobody else has printed in time."""
        for one in list(self._unprinted):
            try:
                self._settle(one, now)
            except BaseException:
                # Otherwise it would fail again and again, and a task that leaves waits for this list to be empty.
                if one in self._unprinted:
                    self._unprinted.remove(one)
                raise

    def _settle(self, one: _Unprinted, now: float) -> None:
        if not one.asks and (now >= one.until or not self._hears_coordinator()):
            # ``Printed`` will not come any more; its monitor still knows, and otherwise the next task prints.
            one.before, one.asks = self._before(one.diagnosis), True
            one.until += PRINTED_AFTER_SECONDS if len(one.before) > 1 else 0.0
        if one.asks and now - one.asked_at >= ASK_AGAIN_SECONDS:
            one.asked_at = now
            self._ask(one)
        if one in self._unprinted and (not one.before or now >= one.until):
            self._unprinted.remove(one)
            self._print(one.kind, one.diagnosis)
            self._publisher.say_where(one.copy)
            self._publisher.page(one.kind, one.diagnosis, one.copy)

    def _hears_coordinator(self) -> bool:
        keeper = self._node.peers.get(self._node.coordinator)
        return keeper is not None and keeper.linked

    # -- who prints --

    def _before(self, diagnosis: Diagnosis) -> list[TaskId]:
        """The first tasks that come before this one, except the culprit."""
        culprit = "" if diagnosis.verdict is None else diagnosis.verdict.culprit
        shape = self._node.cluster.shape
        first = self._node.coordinator
        tasks = (first, *(task for task in shape.tasks() if task != first))
        before = tasks[: tasks.index(self._node.task)]
        return [task for task in before if str(task) != culprit][:MOST_ASKED]

    def _ask(self, one: _Unprinted) -> None:
        """Ask those before this task; one that is gone without having printed is waited for no longer."""
        found = self._descriptions(one.before)
        for task in list(one.before):
            seen = found.get(task)
            if seen is not None and 0 < seen.printed_seconds < VERDICT_SECONDS:
                self._leave_to(one, task)
                return
            if seen is None or seen.exited:
                one.before.remove(task)

    def _descriptions(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, Description]:
        if not tasks:
            return {}
        cluster = self._node.cluster
        pool = ThreadPoolExecutor(len(tasks), thread_name_prefix="who prints")
        try:
            asked = {task: pool.submit(self._ask_monitor, cluster.address_of(task), ASK_ALL_SECONDS) for task in tasks}
            wait(asked.values(), timeout=2 * ASK_ALL_SECONDS)
            done = {task: future for task, future in asked.items() if future.done()}
            return {task: future.result() for task, future in done.items() if future.exception() is None}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _leave_to(self, one: _Unprinted, printer: TaskId) -> None:
        self._unprinted.remove(one)
        self._printed[_key(one.diagnosis)] = time.monotonic()
        self._publisher.say_printed(one.diagnosis, printer, one.copy)

    def _print(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        self._printed[_key(diagnosis)] = time.monotonic()
        self._publisher.say_report(kind, diagnosis)
        self._node.report_printed()
        self._tell_printed(kind, diagnosis)

    def _say_again(self, kind: ReportKind, diagnosis: Diagnosis, copy: str) -> None:
        """One line for a fault that still holds, now and then, and when the job ends because of it."""
        now, key = time.monotonic(), _key(diagnosis)
        if diagnosis.ends or kind is ReportKind.STALL or now - self._printed[key] >= VERDICT_AGAIN_SECONDS / 2:
            self._printed[key] = now
            self._publisher.say_again(kind, diagnosis, copy)

    def _tell_printed(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        if self._node.task == self._node.coordinator:
            self._publisher.tell_printed(kind, diagnosis, self._node.peers)


def _key(diagnosis: Diagnosis) -> Key:
    verdict = diagnosis.verdict
    return (Cause.UNKNOWN, "") if verdict is None else (verdict.cause, verdict.culprit)
