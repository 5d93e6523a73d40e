"""What a watchdog found out goes to people, to the other tasks and to files."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.diagnose import phrases as said
from lockstep.diagnose.text import lead_line, notice_line, render
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.endings import Ends
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Printed, Report
from lockstep.runtime import phrases
from lockstep.runtime.startup.pages import NO_PAGES, Pages
from lockstep.runtime.startup.run_name import run_name
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.watch.dump import dump_bytes, file_name
from lockstep.runtime.watch.events import EVENTS as EVENTS
from lockstep.runtime.watch.events import REPORT, event_fields, page_fields
from lockstep.runtime.watch.pager import Pager
from lockstep.runtime.watch.run_folder import RunFolder
from lockstep.runtime.watch.snapshot import Shown, journal_rows, snapshot_of
from lockstep.security.refusals import REFUSALS, RefusalNotice


class Publisher:
    """Prints, sends and writes for one task. Which task prints a report is decided elsewhere (``printing.py``)."""

    def __init__(self, node: Shown, say: Callable[[str], None], asked_folder: str, pages: Pages = NO_PAGES) -> None:
        self._node = node
        self.run = run_name(os.environ)
        self.verdicts: Counter[str] = Counter()
        """How many reports there were of each cause, for metrics."""
        self._reported: tuple[dict[str, str], float] | None = None
        self._pager = Pager(pages, say)
        self.say = say
        self._said: set[str] = set()
        self.folder = RunFolder(asked_folder, lambda: node.job)
        self._hear_no_refusals = REFUSALS.subscribe(self._note_refusals)

    def close(self) -> None:
        self._hear_no_refusals()
        self._pager.close()
        self.folder.close()

    # -- to people --

    def say_notice(self, diagnosis: Diagnosis) -> None:
        self.say(notice_line(diagnosis.verdict) if diagnosis.verdict is not None else lead_line(diagnosis))

    def say_report(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        """The whole report."""
        self.say(render(kind, diagnosis))

    def say_printed(self, diagnosis: Diagnosis, printer: TaskId, copy: str) -> None:
        """One line instead of a report that another task has printed."""
        self.say(said.printed_by(lead_line(diagnosis, remedy=False), str(printer), copy))

    def say_again(self, kind: ReportKind, diagnosis: Diagnosis, copy: str) -> None:
        """One line instead of a report that was printed before and still holds."""
        line = said.printed_before(lead_line(diagnosis, remedy=False), copy)
        ends = Ends.AFTER_STALL if diagnosis.verdict is None else diagnosis.verdict.ends
        self.say(said.no_progress_for_too_long(line, ends) if kind is ReportKind.STALL else line)

    def say_where(self, copy: str) -> None:
        """Where the files of a report are."""
        if copy:
            self._say_once(phrases.files_are_in(str(self.folder.nearest)))

    def say_problem(self, problem: Exception) -> None:
        self.say(phrases.report_unreadable(problem))

    def _say_once(self, sentence: str) -> None:
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            self.say(sentence)

    # -- to the other tasks; never blocks --

    def tell_peers(self, kind: ReportKind, diagnosis: Diagnosis, peers: Mapping[TaskId, PeerKeeper]) -> None:
        text = notice_line(diagnosis.verdict) if diagnosis.verdict is not None else diagnosis.summary
        report = Report(kind, text, diagnosis.to_json())
        for keeper in peers.values():
            keeper.send(report)

    def tell_printed(self, kind: ReportKind, diagnosis: Diagnosis, peers: Mapping[TaskId, PeerKeeper]) -> None:
        culprit = "" if diagnosis.verdict is None else diagnosis.verdict.culprit
        for keeper in peers.values():
            keeper.send(Printed(kind, culprit))

    # -- to files --

    def write(self, kind: ReportKind, diagnosis: Diagnosis) -> str:
        """Write the report beside this task's snapshot; the path of its text, empty where nothing could be written."""
        files = {
            f"{REPORT}.txt": render(kind, diagnosis).encode(),
            f"{REPORT}.json": diagnosis.to_json(),
        }
        self._remember(kind, diagnosis.verdict)
        folder = self._write_all(files, kind)
        return f"{folder}/{REPORT}.txt" if folder else ""

    def _remember(self, kind: ReportKind, verdict: Verdict | None) -> None:
        fields = self._event(kind, verdict)
        told = {name: fields[name] for name in ("kind", "cause", "culprit", "peer")}
        if self.last_verdict != {**told, "holds": True}:  # a fault that still holds is reported again and again
            self.verdicts[fields["cause"]] += 1
        self._reported = (told, time.monotonic())

    @property
    def last_verdict(self) -> dict[str, Any] | None:
        """The last report, found here or told by the coordinator. It ``holds`` until a step ends here."""
        reported = self._reported
        if reported is None:
            return None
        return {**reported[0], "holds": self._node.sampler.last_step_at() <= reported[1]}

    def write_if_first(self, kind: ReportKind, diagnosis: Diagnosis) -> str:
        """As ``write``, unless the folder of the run has a report already: that one came first, and stays."""
        folder = self._write_all({}, kind)
        path = f"{folder}/{REPORT}.txt"
        return path if folder and Path(path).exists() else self.write(kind, diagnosis)

    def dump(self, why: str, *, tells: bool = False) -> None:
        """Write this task's snapshot and journal. ``tells``: print where, to a person who asked for it."""
        folder = self._write_all({}, why)
        if folder and tells:
            self.say(phrases.files_on_request(why, self._node.task, f"{folder}/{file_name(self._node.task)}"))
        elif folder:
            self._say_once(phrases.files_are_in(folder))

    def _write_all(self, files: Mapping[str, bytes], why: str) -> str:
        snapshot = dump_bytes(snapshot_of(self._node), journal_rows(self._node), why)
        left = self.folder.write({**files, file_name(self._node.task): snapshot})
        self._say_once(left.problem)
        return "" if left.where is None else str(left.where)

    def note(self, kind: ReportKind, diagnosis: Diagnosis | None = None, text: str = "") -> None:
        """Append one line to the events of the run; if that fails, nothing else suffers."""
        self._append(kind, self._event(kind, None if diagnosis is None else diagnosis.verdict, text))

    def note_injected(self, fault: str) -> None:
        """A drill's fault of this name has begun."""
        self.note(ReportKind.INJECTED, text=fault)

    def note_replica(self, *, whole: bool) -> None:
        """The same, with what a program needs to know of second homes."""
        fields = self._event(ReportKind.REPLICA, text=phrases.replica_changed(has_one=whole))
        self._append(ReportKind.REPLICA, {**fields, "whole": whole})

    def page(self, kind: ReportKind, diagnosis: Diagnosis, copy: str) -> None:
        """Call whoever asked to be called; ``copy`` is where the report is."""
        self._pager.send(page_fields(self._event(kind, diagnosis.verdict), diagnosis, copy))

    def _event(self, kind: ReportKind, verdict: Verdict | None = None, text: str = "") -> dict[str, Any]:
        return event_fields(kind, self._node.task, self._node.job, self.run, verdict, text)

    def _note_refusals(self, notice: RefusalNotice) -> None:
        """On the thread that has printed it."""
        self._append(ReportKind.REFUSED, {**self._event(ReportKind.REFUSED, text=str(notice)), **asdict(notice)})

    def _append(self, kind: ReportKind, fields: Mapping[str, object]) -> None:
        # A notice alone is not worth a folder, and a stranger must not be able to make one.
        make = kind not in (ReportKind.NOTICE, ReportKind.REFUSED) or self.folder.is_named
        self._say_once(self.folder.append(EVENTS, json.dumps(fields).encode() + b"\n", make).problem)
