"""The metrics of a watched job, under the names that tasks of ours have: its ranks are their tasks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lockstep.flight.phrases import rank_name
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import hex64
from lockstep.runtime.monitor import task_metrics as names
from lockstep.runtime.monitor.exposition import MetricPage
from lockstep.runtime.monitor.metrics_server import MetricsServer, MetricsWriter
from lockstep.runtime.startup.metrics_options import MetricsOptions
from lockstep.runtime.startup.run_name import run_name
from lockstep.version import __version__
from lockstep.watch.reports import MadeReport, Reports
from lockstep.watch.sights import RankSight, Vitality

FILE: Final = "watch"
"""``lockstep.prom`` becomes ``lockstep-watch.prom``."""
SLOW_SECONDS: Final = 60.0
"""So long is a straggler shown, though steps end."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, as the board shows it. ``life``: None if its process is on another host."""

    step: int = 0
    stepped: float = 0.0
    seconds: float = 0.0
    """What its last steps took, each."""
    life: Vitality | None = None
    exit_code: int | None = None


class JobBoard:
    """The watcher's loop tells it what it sees; whoever scrapes reads it, on another thread."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._rows: Mapping[int, RankRow] = {}
        self._run = run_name(os.environ)
        self._host = socket.gethostname()
        self._shown = 0
        self._over = 0
        """So many reports do not hold any more."""

    def show(self, lives: Iterable[RankSight], steps: Mapping[int, tuple[int, float]]) -> None:
        """``lives``: ranks of this host; ``steps``: of all, how many each has made, and when the last ended."""
        here = {one.rank: one for one in lives}
        self._rows = {rank: self._row(rank, here.get(rank), steps.get(rank)) for rank in sorted({*here, *steps})}

    def _row(self, rank: int, here: RankSight | None, counted: tuple[int, float] | None) -> RankRow:
        before = self._rows.get(rank, RankRow())
        step, stepped = counted or (before.step, before.stepped)
        seconds = before.seconds
        if before.step and step > before.step:
            seconds = (stepped - before.stepped) / (step - before.step)
        if here is None:
            return RankRow(step, stepped, seconds)
        return RankRow(step, stepped, seconds, here.life, here.exit_code)

    def moved(self) -> None:
        """A step has ended: what was said before is over, unless it was that steps are slow."""
        made = self._reports.made
        slow = bool(made) and made[-1].verdict.cause is Cause.STRAGGLER
        if not (slow and time.time() - made[-1].at < SLOW_SECONDS):
            self._over = len(made)

    def look(self) -> bool:
        """Whether there is a report that no file shows yet."""
        before, self._shown = self._shown, len(self._reports.made)
        return self._shown > before

    def text(self) -> str:
        made = list(self._reports.made)
        page = MetricPage({"run": self._run})
        watcher = self._reports.task
        page.add(
            names.TASK_INFO, 1, task=watcher, job_id=hex64(self._reports.job), host=self._host, version=__version__
        )
        for rank, row in self._rows.items():
            self._add_rank(page, rank_name(rank), row)
        if made:
            page.add(names.VERDICT, int(len(made) > self._over), task=watcher, **_labels(made[-1]))
        for cause, count in sorted(Counter(one.verdict.cause.value for one in made).items()):
            page.add(names.VERDICTS, count, task=watcher, cause=cause)
        return page.text()

    def _add_rank(self, page: MetricPage, task: str, row: RankRow) -> None:
        if row.life is not None:
            page.add(names.TASK_UP, int(row.life in (Vitality.RUNS, Vitality.STOPPED)), task=task)
            page.add(names.TASK_STOPPED, int(row.life is Vitality.STOPPED), task=task)
        if row.exit_code is not None:
            page.add(names.EXIT_CODE, row.exit_code, task=task)
        if row.step:
            page.add(names.STEP, row.step, task=task)
            page.add(names.LAST_STEP, row.stepped, task=task)
        if row.seconds:
            page.add(names.LAST_STEP_SECONDS, row.seconds, task=task)


def _labels(made: MadeReport) -> dict[str, str]:
    found = made.verdict
    return {"kind": made.kind.value, "cause": found.cause.value, "culprit": found.culprit, "peer": found.peer}


@contextlib.contextmanager
def showing(options: MetricsOptions, board: JobBoard) -> Iterator[None]:
    """Show the board while the block runs, if that was asked for. BadInput if it is not possible."""
    with contextlib.ExitStack() as until_end:
        if options.port:
            until_end.callback(MetricsServer(options.address(), board.text).close)
        if options.file:
            until_end.callback(MetricsWriter(board, options.path(FILE)).close)
        yield
