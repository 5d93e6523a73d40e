"""The schema of what is told about a run: one JSON object per line of ``events.jsonl``, and what a pager is sent.

``docs/events.md`` documents every field. Fields are added under the same number; a field that changes its meaning or
goes away makes a new number.
"""

from __future__ import annotations

import time
from typing import Any, Final

from lockstep.diagnose.text import notice_line
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import JobId, TaskId, hex64

EVENTS: Final = "events.jsonl"
"""One line for each notice, verdict and stall, for each fault that a drill has planted, for refused callers, and for
second homes that are lost or filled."""
REPORT: Final = "report"
SCHEMA: Final = 1
NO_STEP: Final = -2


def event_fields(
    kind: ReportKind, task: TaskId | str, job: JobId, run: str, verdict: Verdict | None = None, text: str = ""
) -> dict[str, Any]:
    """One line of events. ``run``: what the engine that started the job calls it, empty if nothing did.
    ``task``: who writes it; a watcher of somebody else's job is no task."""
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "job": hex64(job),
        "run": run,
        "task": str(task),
        "kind": kind.value,
        "text": text or (notice_line(verdict) if verdict is not None else ""),
        "cause": "" if verdict is None else verdict.cause.value,
        "culprit": "" if verdict is None else verdict.culprit,
        "peer": "" if verdict is None else verdict.peer,
        "key": "" if verdict is None else verdict.key,
        "step": NO_STEP if verdict is None else verdict.step,
    }


def page_fields(event: dict[str, Any], diagnosis: Diagnosis, report: str) -> dict[str, Any]:
    """What a person who is called needs besides: what to do, whether the job goes on, and where to read more."""
    verdict = diagnosis.verdict
    return {
        **event,
        "text": event["text"] or diagnosis.summary,
        "remedy": "" if verdict is None else verdict.remedy,
        "parameters": [] if verdict is None else list(verdict.names),
        "host": "" if verdict is None else verdict.host,
        "pid": 0 if verdict is None else verdict.pid,
        "stack": [] if verdict is None else list(verdict.stack),
        "job_ends": diagnosis.ends,
        "report": report,
    }
