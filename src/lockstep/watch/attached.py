"""``lockstep watch PID...``: a job that runs already. Nobody gets in there any more, so there are no collectives, no
steps and no names; processes, stacks and the kernel's connections can still be had."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from lockstep.diagnose.verdict import Diagnosis
from lockstep.errors import BadInput
from lockstep.flight.analysis import account_of
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.endings import NOTICED
from lockstep.protocol.core.ids import hex64
from lockstep.runtime import processes
from lockstep.watch import phrases
from lockstep.watch.asking import findable
from lockstep.watch.entry import watch_folder
from lockstep.watch.job_metrics import JobBoard, showing
from lockstep.watch.judging import JobSight, judge, task_lines
from lockstep.watch.local_ranks import LocalRanks
from lockstep.watch.reports import Reports
from lockstep.watch.sights import Vitality
from lockstep.watch.spec import WatchSpec
from lockstep.watch.standstill import Saying, Standstill

LOOK_SECONDS: Final = 5.0
"""A look takes the stack of every rank, which costs a processor for a moment."""
STILL_SECONDS: Final = 60.0
"""All stacks are the same for so long: then nothing moves."""


def run_attached(spec: WatchSpec, say: Callable[[str], None]) -> int:
    """Until all ranks are gone, or somebody ends it."""
    with (
        processes.SignalInbox(processes.STOP_SIGNALS) as inbox,
        contextlib.closing(Reports(spec.folder, spec.pages, say)) as reports,
        LocalRanks(None, spec.pids) as ranks,
        watch_folder() as folder,
        findable(folder, hex64(reports.job), [f"PID {pid}" for pid in spec.pids]) as door,
        showing(spec.metrics, board := JobBoard(reports)),
    ):
        ranks.search()
        if not ranks.numbers:
            raise BadInput(
                "none of these processes is a rank, nor has it started one: no variables RANK and WORLD_SIZE; give the "
                "numbers of torchrun or of its ranks, as the user who started them."
            )
        say(phrases.attached(ranks.numbers))
        watch = _Attached(ranks, reports, board)
        while True:
            processes.wait_readable((inbox.fileno(), door.fileno(), *ranks.descriptors), LOOK_SECONDS)
            stopped = inbox.take()
            if stopped:
                return 128 + signal.Signals(stopped[0])
            ranks.refresh()
            if not watch.look():
                return 0
            door.serve(lambda: watch.seen)


class _Attached:
    """Looks, and says what it sees."""

    def __init__(self, ranks: LocalRanks, reports: Reports, board: JobBoard) -> None:
        self._ranks = ranks
        self._reports = reports
        self._standstill = Standstill()
        self._stands: object = None
        self._moved = time.time()
        self._board = board
        self.seen = Diagnosis()
        """The last look, for whoever asks."""

    def look(self) -> bool:
        """Whether any rank is left."""
        sights = self._ranks.sights(all_stacks=True)
        now = time.time()
        stands = {rank: (one.life, one.stack) for rank, one in sights.items()}
        if stands != self._stands:
            self._stands, self._moved = stands, now
            self._board.moved()
        waited = now - self._moved
        look = JobSight(account=account_of({}), sights=sights, now=now, waited=waited)
        diagnosis = judge(look)
        verdict = None if diagnosis is None else diagnosis.verdict
        if verdict is not None and verdict.cause in NOTICED and waited < STILL_SECONDS:
            diagnosis = None
        say = self._standstill.found(diagnosis, waited)
        if say is Saying.VERDICT and diagnosis is not None:
            self._reports.verdict(ReportKind.VERDICT, diagnosis, {})
        elif say is Saying.NOTICE and diagnosis is not None:
            self._reports.notice(diagnosis)
        well = Diagnosis(healthy=True, summary=phrases.stacks_changed(waited), time=now, tasks=tuple(task_lines(look)))
        self.seen = replace(diagnosis or well, job=hex64(self._reports.job), asker="lockstep why")
        self._board.show(sights.values(), {})
        return any(one.life is not Vitality.GONE for one in sights.values())
