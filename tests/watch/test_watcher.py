"""When a watcher looks, and what it makes of two looks: with ranks on paper and a clock that is told the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flight.jobs import STOP, PaperJob, steps
from lockstep.flight.recording import Recording
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.timing import NOTICE_SECONDS
from lockstep.runtime.startup.pages import Pages
from lockstep.watch.reports import Reports
from lockstep.watch.sights import RankSight, Vitality, Work
from lockstep.watch.watcher import LOOK_SECONDS, Watcher

STEP_SECONDS = 0.1


@dataclass
class PaperRanks:
    """Two ranks that have made so many calls, one in each step; then rank 1 stays in its program, or does not."""

    now: float = 1000.0
    made: int = 0
    counted: int = 0
    stays: bool = False
    stepped: float = 0.0
    looks: list[float] = field(default_factory=list)
    world: int = 2
    silent_hosts: tuple[str, ...] = ()

    def steps(self) -> Mapping[int, tuple[int, float]]:
        return dict.fromkeys(range(2), (self.counted, self.stepped))

    def recordings(self) -> Mapping[int, Recording]:
        plans = {0: [*steps(self.made + 1)], 1: [*steps(self.made), *([STOP] if self.stays else steps(1))]}
        return PaperJob({"0": (0, 1)}, plans).run().recordings()

    def sights(self, *, all_stacks: bool) -> Mapping[int, RankSight]:
        self.looks.append(self.now)
        return {
            rank: RankSight(rank=rank, life=Vitality.RUNS, work=Work.PROGRAM, recording=one)
            for rank, one in self.recordings().items()
        }


@pytest.fixture
def ranks() -> PaperRanks:
    return PaperRanks()


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    with closing(Reports(str(tmp_path / "run"), Pages(), lambda _: None)) as made:
        yield made


def watching(ranks: PaperRanks, reports: Reports) -> Watcher:
    return Watcher(ranks, reports, clock=lambda: ranks.now)


def train(ranks: PaperRanks, watcher: Watcher, count: int) -> None:
    for _ in range(count):
        ranks.now += STEP_SECONDS
        ranks.made, ranks.counted, ranks.stepped = ranks.made + 1, ranks.counted + 1, ranks.now
        watcher.tick()


def wait(ranks: PaperRanks, watcher: Watcher, seconds: float) -> None:
    """As the loop does: it sleeps until something is due."""
    until = ranks.now + seconds
    while ranks.now < until:
        ranks.now += max(watcher.pause(0.25), 1e-3)
        watcher.tick()


def test_a_look_at_the_start_of_a_job_makes_no_later_one_wait(ranks: PaperRanks, reports: Reports) -> None:
    """Calls have been made since then, of course: that says nothing about a job that stands still now."""
    watcher = watching(ranks, reports)
    wait(ranks, watcher, 8.0)
    assert ranks.looks, "a job that starts slowly is looked at"
    train(ranks, watcher, 30)
    ranks.stays, struck, before = True, ranks.now, len(reports.made)
    wait(ranks, watcher, NOTICE_SECONDS + LOOK_SECONDS + 0.01)
    looks = [round(at - struck, 2) for at in ranks.looks if at > struck]
    assert looks == [NOTICE_SECONDS, NOTICE_SECONDS + LOOK_SECONDS]
    assert [one.verdict.cause for one in reports.made[before:]] == [Cause.USER_CODE]


def test_calls_that_go_on_between_two_looks_are_no_standstill(ranks: PaperRanks, reports: Reports) -> None:
    watcher = watching(ranks, reports)
    train(ranks, watcher, 30)
    for _ in range(20):
        wait(ranks, watcher, LOOK_SECONDS)
        ranks.made += 1  # an evaluation that makes calls, and no steps
    assert len(ranks.looks) > 2
    assert not reports.made
