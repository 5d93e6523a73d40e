"""What a watcher has found out goes to stderr, into the folder of the run, and to whoever asked to be called."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lockstep.diagnose.text import notice_line, render
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import JobId, hex64
from lockstep.runtime.startup.pages import Pages
from lockstep.runtime.startup.run_name import run_name
from lockstep.runtime.watch.events import EVENTS, REPORT, event_fields, page_fields
from lockstep.runtime.watch.pager import Pager
from lockstep.runtime.watch.run_folder import RunFolder
from lockstep.watch import phrases

DUMP: Final = "rank_{}.json"
"""The dumps of the flight recorder, as ``lockstep why FOLDER`` finds them."""


@dataclass(frozen=True, slots=True)
class MadeReport:
    """What was said, and when."""

    kind: ReportKind
    verdict: Verdict
    at: float


class Reports:
    """Speaks for one watched job."""

    def __init__(self, folder: str, pages: Pages, say: Callable[[str], None]) -> None:
        self.say = say
        self.job = JobId(secrets.randbits(64) or 1)
        self.task = f"watcher on {socket.gethostname()}"
        self.made: list[MadeReport] = []
        """All notices and verdicts so far."""
        self._run = run_name(os.environ)
        self._pager = Pager(pages, say)
        self._folder = RunFolder(folder, lambda: self.job)
        self._said: set[str] = set()

    def close(self) -> None:
        self._pager.close()
        self._folder.close()

    def notice(self, diagnosis: Diagnosis) -> None:
        """One line; the files of a run that has none are not worth a folder for it."""
        if diagnosis.verdict is not None:
            self.say(notice_line(diagnosis.verdict))
        self._note(ReportKind.NOTICE, diagnosis)

    def verdict(self, kind: ReportKind, diagnosis: Diagnosis, dumps: Mapping[int, bytes]) -> None:
        """The whole report, its files, and a call to whoever is to be called."""
        diagnosis = replace(diagnosis, job=hex64(self.job))
        self.say(render(kind, diagnosis))
        files = {
            f"{REPORT}.txt": render(kind, diagnosis).encode(),
            f"{REPORT}.json": diagnosis.to_json(),
            **{DUMP.format(rank): dump for rank, dump in dumps.items()},
        }
        left = self._folder.write(files)
        self._say_once(left.problem)
        if left.where is not None:
            self._say_once(phrases.files_are_in(str(left.where)))
        copy = "" if left.where is None else f"{left.where}/{REPORT}.txt"
        event = self._note(kind, diagnosis)
        self._pager.send(page_fields(event, diagnosis, copy))

    def _note(self, kind: ReportKind, diagnosis: Diagnosis) -> dict[str, Any]:
        if diagnosis.verdict is not None:
            self.made.append(MadeReport(kind, diagnosis.verdict, time.time()))
        event = event_fields(kind, self.task, self.job, self._run, diagnosis.verdict)
        make = kind is not ReportKind.NOTICE or self._folder.is_named
        self._say_once(self._folder.append(EVENTS, json.dumps(event).encode() + b"\n", make).problem)
        return event

    def _say_once(self, sentence: str) -> None:
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            self.say(sentence)
