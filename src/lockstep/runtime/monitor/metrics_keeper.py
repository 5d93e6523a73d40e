"""What a monitor shows at ``/metrics``: it asks its task when it is asked itself, and keeps the last answer.

So metrics cost the task nothing between two scrapes, and a task that is frozen, or gone, has its last values and the
word that they are old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lockstep.foreign import read_json
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import TaskId, hex64
from lockstep.protocol.core.timing import ASK_SECONDS
from lockstep.runtime.monitor.exposition import MetricPage
from lockstep.runtime.monitor.freezer import task_facts
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.task_metrics import SeenTask, ToldByTask, fill
from lockstep.transports.control.monitor_client import Unreachable, fetch_metrics

ASK_AGAIN_SECONDS: Final = 1.0
"""However many scrapers there are, the task is not asked more often."""
MAX_BYTES: Final = 1 << 18

Ask = Callable[[str, float], bytes]


@dataclass(frozen=True, slots=True)
class LifeSpan:
    """What one incarnation of the task has made: ``counted`` steps up to ``end``, in ``seconds`` of work."""

    start: int
    end: int
    counted: int
    seconds: float


def useful_seconds(lives: list[LifeSpan]) -> float:
    """Seconds of work that still count: what a later life began before was made again, and is worth nothing."""
    total, redone_from = 0.0, float("inf")
    for life in reversed(lives):
        if life.counted:
            kept = min(life.end, redone_from) - (life.end - life.counted)
            total += life.seconds * min(max(kept / life.counted, 0.0), 1.0)
        redone_from = min(redone_from, life.start)
    return total


class MetricsKeeper:
    """Any thread may ask; one at a time does."""

    def __init__(self, record: TaskRecord, run: str, ask: Ask = fetch_metrics) -> None:
        """``run``: the job's name in its engine, as in its events."""
        self._record = record
        self._run = run
        self._ask = ask
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._asked_at = -ASK_AGAIN_SECONDS
        self._fields: Mapping[str, Any] | None = None
        self._at = 0.0
        self._now = False
        self._lives: dict[str, LifeSpan] = {}
        self._news = (0, False)
        self._counting = -1
        """The incarnation that has been asked, and counts since then."""

    def text(self) -> str:
        """The page, with what the task says now, or has said last."""
        with self._lock:
            if time.monotonic() - self._asked_at >= ASK_AGAIN_SECONDS:
                self._ask_task()
                self._asked_at = time.monotonic()
            return self._page(self._told()).text()

    def look(self) -> bool:
        """Called often. Ask without being asked where nobody could ask later: after a report, and when all steps are
        made, the task is gone before the next scrape. Once at the beginning of each life too: it counts from then on.
        Returns whether it asked."""
        report = self._record.report
        news = (report.printed, report.phase == TaskPhase.FINISHING.value)
        due = news != self._news or (bool(report.task_address) and report.incarnation != self._counting)
        if due:
            self._news = news
            with self._lock:
                self._ask_task()
        return due

    def _ask_task(self) -> None:
        report, self._now = self._record.report, False
        if not report.task_address or not self._is_running():
            return
        try:
            fields = read_json(self._ask(report.task_address, ASK_SECONDS), MAX_BYTES)
            self._page(ToldByTask(fields=fields, at=0.0, now=True, goodput=0.0))  # nothing else is ever kept
            start, end, counted = (int(fields[name]) for name in ("started_at", "step", "counted"))
            self._lives[str(fields["incarnation"])] = LifeSpan(start, end, counted, float(fields["productive"]))
        except (Unreachable, ValueError, TypeError, KeyError, AttributeError):
            return
        self._fields, self._at, self._now, self._counting = fields, time.time(), True, report.incarnation

    def _is_running(self) -> bool:
        facts = task_facts(self._record.pid) if self._is_there() else None
        if facts is not None:
            self._record.on_state(stopped=facts.stopped)
        return facts is not None and not facts.stopped and not facts.dead

    def _is_there(self) -> bool:
        return self._record.pid != 0 and self._record.exit_code is None

    def _told(self) -> ToldByTask | None:
        if self._fields is None:
            return None
        elapsed = time.monotonic() - self._began
        goodput = min(1.0, useful_seconds(list(self._lives.values())) / elapsed) if elapsed > 0 else 0.0
        return ToldByTask(fields=self._fields, at=self._at, now=self._now, goodput=goodput)

    def _page(self, told: ToldByTask | None) -> MetricPage:
        record, found = self._record, self._record.describe()
        seen = SeenTask(
            host=found.host,
            version=found.version,
            job=hex64(found.job),
            phase=found.phase,
            up=self._is_there(),
            stopped=record.stopped_seconds() >= 0,
            silent=record.silent_seconds(),
            exit_code=record.exit_code,
            starts=record.starts,
        )
        return fill(MetricPage({"run": self._run, "task": found.task}), seen, told)


def short_name(task: str) -> str:
    """``worker-0``, for file names; a program that has not joined a job has its own name."""
    try:
        known = TaskId.parse(task)
    except ValueError:
        return task
    return f"{known.role.value}-{known.index}"
