"""A job whose steps end, but slowly: names the rank that all others wait for, if it has become slow or always was."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.flight import phrases as recorded
from lockstep.protocol.core.causes import Cause
from lockstep.watch import phrases
from lockstep.watch.late_clock import Slowdown
from lockstep.watch.reports import Reports
from lockstep.watch.sights import Ranks, RankSight
from lockstep.watch.straggling import SteadyLooks, Straggler, straggler_in

LOOK_SECONDS: Final = 0.8
"""Between two looks at a job that has become slow."""
AGAIN_SECONDS: Final = 60.0
"""Until a rank that has become slow is named again."""
STILL_SECONDS: Final = 600.0
"""Until one that always was slow is named again."""


class SlowRanks:
    """Told a few times a second how steps go."""

    def __init__(self, ranks: Ranks, reports: Reports) -> None:
        self._ranks = ranks
        self._reports = reports
        self._looked = 0.0
        self._steady = SteadyLooks()
        self._named: dict[int, float] = {}

    def tick(self, slow: Slowdown | None, step: int, usual: float, now: float) -> None:
        """``slow``: steps have become slow; None: they are as they were."""
        if slow is not None:
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look_since_slow(slow, now)
        elif self._steady.due(now, usual):
            self._look_at_steady(step, usual, now)

    def _look_since_slow(self, slow: Slowdown, now: float) -> None:
        found = straggler_in(self._ranks.recordings(), now - max(8 * slow.recent, 2.0))
        if found is None or now - self._named.get(found.rank, 0.0) < AGAIN_SECONDS:
            return
        self._name(found, slow.step, phrases.job_is_slow(slow.step, slow.recent, slow.usual), now)

    def _look_at_steady(self, step: int, usual: float, now: float) -> None:
        found = self._steady.found(straggler_in(self._ranks.recordings(), self._steady.since), now)
        if found is not None and now - self._named.get(found.rank, 0.0) >= STILL_SECONDS:
            self._name(found, step, phrases.job_waits(usual, found.share), now)

    def _name(self, found: Straggler, step: int, how_slow: str, now: float) -> None:
        self._named[found.rank] = now
        one = self._ranks.sights(all_stacks=False).get(found.rank, RankSight(rank=found.rank))
        verdict = Verdict(
            cause=Cause.STRAGGLER,
            culprit=recorded.rank_name(found.rank),
            host=one.host,
            pid=one.pid,
            step=step,
            what=phrases.straggler(phrases.whom(found.rank, one.pid, one.host), found.lag, found.calls, how_slow),
            stack=tuple(recorded.stack_line(line) for line in one.stack),
            remedy=phrases.remedy_straggler(),
        )
        self._reports.notice(replace(Diagnosis(), time=now, asker="lockstep watch", verdict=verdict))
