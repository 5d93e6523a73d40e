"""What a watchdog has found out goes to people, to the other tasks and to files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from lockstep.diagnose.page import page
from lockstep.diagnose.text import notice_line, render
from lockstep.diagnose.verdict import Diagnosis, ReportError, read_diagnosis
from lockstep.protocol.core.causes import WITH_FILES, ReportKind
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Report
from lockstep.runtime import phrases
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.watch.dump import dump_bytes, file_name
from lockstep.runtime.watch.run_folder import RunFolder
from lockstep.runtime.watch.snapshot import Shown, journal_rows, snapshot_of

EVENTS = "events.jsonl"
"""One line for each notice, verdict and stall, and for each fault that a drill has planted."""

REPORT = "report"


class Publisher:
    """Says, sends and writes for one task."""

    def __init__(self, node: Shown, say: Callable[[str], None], asked_folder: str) -> None:
        self._node = node
        self._say = say
        self._said: set[str] = set()
        self.folder = RunFolder(asked_folder, lambda: node.job)

    def publish(self, kind: ReportKind, diagnosis: Diagnosis, quiet: bool = False) -> None:
        """Say it here, and write it down. A notice is one line; a verdict or a stall the whole report, with files."""
        if not quiet:
            self._say_it(kind, diagnosis)
        if kind in WITH_FILES:
            self._write(kind, diagnosis)
        # Last: whoever reads of it among the events finds the files.
        self.note(kind, diagnosis)

    def pass_on(self, report: Report) -> None:
        """Say what the coordinator has found out, in its words."""
        try:
            diagnosis = read_diagnosis(report.diagnosis)
        except ReportError as error:
            self._say(f"the coordinator sent a report that cannot be read: {error}")
            return
        self._say_it(report.kind, diagnosis)
        if report.kind in WITH_FILES:
            self._write(report.kind, diagnosis)

    def tell_peers(self, kind: ReportKind, diagnosis: Diagnosis, peers: Mapping[TaskId, PeerKeeper]) -> None:
        """Send it to everybody; never blocks."""
        text = notice_line(diagnosis.verdict) if diagnosis.verdict is not None else diagnosis.summary
        report = Report(kind, text, diagnosis.to_json())
        for keeper in peers.values():
            keeper.send(report)

    def _say_it(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        if kind is ReportKind.NOTICE and diagnosis.verdict is not None:
            self._say(f"notice: {notice_line(diagnosis.verdict)}")
        else:
            self._say(f"{kind}\n{render(kind, diagnosis)}")

    def _write(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        files = {
            f"{REPORT}.txt": render(kind, diagnosis).encode(),
            f"{REPORT}.json": diagnosis.to_json(),
            f"{REPORT}.html": page(kind, diagnosis),
        }
        self._write_all(files, kind)

    def dump(self, why: str, *, tells: bool = False) -> None:
        """Write this task's snapshot and journal. ``tells``: say where each time, to a person who asked for it."""
        self._write_all({}, why, tells=tells)

    def _write_all(self, files: Mapping[str, bytes], why: str, *, tells: bool = False) -> None:
        snapshot = dump_bytes(snapshot_of(self._node), journal_rows(self._node), why)
        left = self.folder.write({**files, file_name(self._node.task): snapshot})
        self._say_once(left.problem)
        if left.where is None:
            return
        if tells:
            self._say(phrases.files_on_request(why, self._node.task, str(left.where / file_name(self._node.task))))
        else:
            self._say_once(phrases.files_are_in(str(left.where)))

    def _say_once(self, sentence: str) -> None:
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)

    def note(self, kind: ReportKind, diagnosis: Diagnosis | None = None, text: str = "") -> None:
        """Append one line to the events of the run; where that does not work, nothing else suffers."""
        verdict = None if diagnosis is None else diagnosis.verdict
        fields = {
            "time": time.time(),
            "task": str(self._node.task),
            "kind": kind,
            "text": text or (notice_line(verdict) if verdict is not None else ""),
            "cause": "" if verdict is None else verdict.cause.value,
            "culprit": "" if verdict is None else verdict.culprit,
            "peer": "" if verdict is None else verdict.peer,
            "key": "" if verdict is None else verdict.key,
            "step": -2 if verdict is None else verdict.step,
        }
        # A notice alone is no reason to leave a folder behind.
        make = kind is not ReportKind.NOTICE or self.folder.is_named
        self._say_once(self.folder.append(EVENTS, json.dumps(fields).encode() + b"\n", make).problem)
