"""Watches one job: sleeps while steps end in time, looks at all ranks when one is late, and says what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.flight.analysis import account_of
from lockstep.flight.recording import Recording
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import hex64
from lockstep.watch import phrases
from lockstep.watch.judging import JobSight, judge, task_lines
from lockstep.watch.late_clock import LateClock
from lockstep.watch.reports import Reports
from lockstep.watch.sights import Ranks, RankSight, Vitality, Work
from lockstep.watch.slow_ranks import SlowRanks
from lockstep.watch.standstill import Saying, Standstill, may_end

LOOK_SECONDS: Final = 0.8
"""Between two looks at a job that stands still."""
LOOK_LATER_SECONDS: Final = 2.0
"""The same once it was said why, and while a job starts: a look at stacks costs a processor."""
_HEARTBEATS: Final = 4096
"""Bytes between two looks that mean nothing: stores and monitors exchange a few."""
_IDLE_SHARE: Final = 0.02
"""Of a processor: whoever loads data uses more."""


@dataclass(slots=True)
class _Starving:
    """Since when a rank has waited for its input while nobody at all was at work on it."""

    since: dict[int, float] = field(default_factory=dict)

    def seconds(self, sights: Mapping[int, RankSight], now: float) -> dict[int, float]:
        idle = [rank for rank, one in sights.items() if one.work is Work.INPUT and not _works(one)]
        self.since = {rank: self.since.get(rank, now) for rank in idle}
        return {rank: now - since for rank, since in self.since.items()}


def _works(one: RankSight) -> bool:
    return one.runnable or max([one.busy, *(helper.busy for helper in one.helpers)]) >= _IDLE_SHARE


@dataclass(slots=True)
class _Bytes:
    """How many bytes have moved between ranks, and since when no more."""

    moved: int = -1
    since: float = 0.0

    def still(self, sights: Mapping[int, RankSight], now: float) -> float:
        links = [counted for one in sights.values() for counted in one.links.values()]
        moved = sum(one.acknowledged + one.received for one in links)
        if abs(moved - self.moved) > _HEARTBEATS:
            self.moved, self.since = moved, now
        return now - self.since if links else 0.0


class Watcher:
    """Call ``tick`` a few times a second, and ``at_end`` once the job's command has ended."""

    def __init__(
        self,
        ranks: Ranks,
        reports: Reports,
        moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``moved`` is called when steps end."""
        self._moved = moved
        self._ranks = ranks
        self._reports = reports
        self._clock = clock
        self._steps = LateClock(clock())
        self._standstill = Standstill()
        self._bytes = _Bytes()
        self._starving = _Starving()
        self._looked = 0.0
        self._records: dict[int, tuple[int, int]] = {}
        self._began_calls = False
        self._slow = SlowRanks(ranks, reports)
        self.ends: Verdict | None = None
        """Why the job should end, if its user asked for that."""
        self.reported = False

    def tick(self, *, lost: bool = False) -> None:
        """``lost``: a rank has just died, which need not be waited for."""
        now = self._clock()
        stood = now - self._steps.moved
        if self._steps.note(self._ranks.steps(), now):
            self._moves(stood)
            self._moved()
        if lost or now >= self._due_at:
            self._look(now, final=False)
        elif self._steps.step and not self._steps.late(now):
            self._slow.tick(self._steps.slowdown(), self._steps.step, self._steps.usual, now)

    def welcome(self) -> None:
        """Another rank has come: the job is still starting."""
        self._steps.alive(self._clock())

    def at_end(self, failed: bool) -> None:
        """The command has ended: say why, if nobody has and it did not end well."""
        if failed and not self.reported:
            self._look(self._clock(), final=True)

    def pause(self, most: float) -> float:
        """How long to sleep until the next tick: no longer than until a look is due."""
        left = self._due_at - self._clock()
        return min(left, most) if left > 0 else most

    @property
    def _due_at(self) -> float:
        unhurried = self._standstill.spoken or not (self._began_calls or self._steps.step)
        return max(self._steps.late_at, self._looked + (LOOK_LATER_SECONDS if unhurried else LOOK_SECONDS))

    def _moves(self, stood: float) -> None:
        if self._standstill.spoken:
            self._reports.say(phrases.goes_on(self._steps.step, stood))
        self._standstill.over()
        self.ends = None

    # -- a job that stands still --

    def _look(self, now: float, *, final: bool) -> None:
        again = self._looked > self._steps.moved
        sights = dict(self._ranks.sights(all_stacks=again))
        self._looked = self._clock()
        recordings = {rank: one.recording for rank, one in sights.items() if one.recording is not None}
        moves = self._calls_move(recordings) and again  # an earlier look says nothing: steps have ended since
        if moves and not final and not any(one.life is Vitality.GONE for one in sights.values()):
            self._steps.alive(now)
            self._standstill.over()
            return
        waited = now - self._steps.moved
        diagnosis = judge(self._job_sight(sights, recordings, now))
        say = self._standstill.found(diagnosis, waited, final=final)
        if diagnosis is None or diagnosis.verdict is None:
            return
        if may_end(diagnosis.verdict, waited):
            self.ends = diagnosis.verdict
        if say is Saying.VERDICT:
            self.reported = True
            dumps = {rank: one.dump for rank, one in sights.items() if one.dump}
            self._reports.verdict(ReportKind.VERDICT, diagnosis, dumps)
        elif say is Saying.NOTICE:
            self._reports.notice(diagnosis)

    def _job_sight(self, sights: dict[int, RankSight], recordings: Mapping[int, Recording], now: float) -> JobSight:
        self._add_unseen(sights)
        return JobSight(
            account=account_of(recordings),
            sights=sights,
            now=now,
            waited=now - self._steps.moved,
            still=self._bytes.still(sights, now),
            starving=self._starving.seconds(sights, now),
            silent_hosts=self._ranks.silent_hosts,
            began=self._began_calls or self._steps.step > 0,
        )

    def answer(self) -> Diagnosis:
        """For somebody who asks: what is seen now, whether or not it was said."""
        now = self._clock()
        late = self._steps.late(now)
        sights = dict(self._ranks.sights(all_stacks=late))
        recordings = {rank: one.recording for rank, one in sights.items() if one.recording is not None}
        look = self._job_sight(sights, recordings, now)
        lost = any(one.life is Vitality.GONE for one in sights.values())
        found = judge(look) if late or lost else None
        if found is None:
            summary = phrases.how_far(self._steps.step, now - self._steps.moved, self._steps.usual)
            found = Diagnosis(healthy=not late, summary=summary, time=now, tasks=tuple(task_lines(look)))
        return replace(found, job=hex64(self._reports.job), asker="lockstep why")

    def _calls_move(self, recordings: Mapping[int, Recording]) -> bool:
        """Whether anybody has made a call or left one since the last look: some jobs have no steps that can be counted,
        and a GPU goes on with what was given to it before."""
        newest = {
            rank: (one.calls[-1].record, sum(call.over for call in one.calls))
            for rank, one in recordings.items()
            if one.calls
        }
        moved = any(rank in self._records and record != self._records[rank] for rank, record in newest.items())
        self._records |= newest
        self._began_calls = self._began_calls or any(call.over for one in recordings.values() for call in one.calls)
        return moved

    def _add_unseen(self, sights: dict[int, RankSight]) -> None:
        life = Vitality.UNKNOWN if self._began_calls else Vitality.UNSEEN
        for rank in range(self._ranks.world):
            sights.setdefault(rank, RankSight(rank=rank, life=life))
