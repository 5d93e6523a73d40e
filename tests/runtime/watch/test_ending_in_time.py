"""The watchdog on synthetic evidence: which cause gets a notice, how many seconds are left, and when the job ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diagnose.faulty import busy, compiling, dead, frozen, looping, stale, straggler, user_code
from helpers.snapshots import PS0, Cluster, missing_gradient, standing
from lockstep.diagnose.evidence import Evidence
from lockstep.diagnose.text import notice_line
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.events import Broken
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.watch.episode import Episode
from lockstep.runtime.watch.watchdog import Watchdog, WatchSettings

SPEC = ClusterSpec(ps_hosts=("a:1",), worker_hosts=("b:1", "c:1"), task=PS0)


class _Node:
    """A coordinator in step 10 whose job has not moved for ``still`` seconds."""

    task = coordinator = PS0
    cluster = SPEC
    forming = leaving = False

    def __init__(self, still: float, recovers: bool) -> None:
        self.recovers = recovers
        self.peers: dict[TaskId, Any] = {}
        self.machine = SimpleNamespace(awaited=())
        self.sampler = SimpleNamespace(
            progress_at=time.monotonic() - still, step_seconds=lambda: [0.1] * 9, usual=lambda floor, _: floor
        )
        self.posted: list[object] = []

    def post(self, event: object) -> None:
        self.posted.append(event)

    def can_recover(self, _: TaskId) -> bool:
        return self.recovers

    def report_printed(self) -> None: ...


class _Said:
    """What a publisher is given."""

    def __init__(self) -> None:
        self.said: list[tuple[ReportKind, Verdict]] = []

    def tell_peers(self, *_: object) -> None: ...

    def tell_printed(self, *_: object) -> None: ...

    def page(self, *_: object) -> None: ...

    def say(self, _: str) -> None: ...

    def say_notice(self, _: Diagnosis) -> None: ...

    def say_report(self, *_: object) -> None: ...

    def say_again(self, *_: object) -> None: ...

    def say_where(self, _: str) -> None: ...

    def write(self, *_: object) -> str:
        return ""

    def note(self, kind: ReportKind, diagnosis: Diagnosis) -> None:
        assert diagnosis.verdict is not None
        self.said.append((kind, diagnosis.verdict))


class _Watchdog(Watchdog):
    shown: Evidence

    def evidence(self) -> Evidence:
        return self.shown


def nothing_proven() -> Cluster:
    """The training thread reports nothing of itself."""
    return standing(missing_gradient(), "", where="", cpu=-1.0)


def look(
    make: Callable[[], Cluster], still: float, episode: Episode | None = None, *, recovers: bool = False
) -> tuple[_Said, bool]:
    """One look at a job that has not moved for this long: what is said, and whether it ends."""
    node, said = _Node(still, recovers), _Said()
    watchdog = _Watchdog(node, WatchSettings(), said)  # type: ignore[arg-type]  # what one look needs
    watchdog.shown = make().evidence()
    watchdog._look(time.monotonic(), episode or Episode(0.0))
    return said, any(isinstance(event, Broken) for event in node.posted)


@pytest.mark.parametrize(("make", "cause"), [(user_code, Cause.USER_CODE), (looping, Cause.LOOPING)])
def test_user_code_gets_a_notice_with_the_seconds_left_and_ends_the_job_after_its_own_time(
    make: Callable[[], Cluster], cause: Cause
) -> None:
    said, ended = look(make, 80.0)
    ((kind, verdict),) = said.said
    assert (kind, verdict.cause, ended) == (ReportKind.NOTICE, cause, False)
    assert 519.0 <= verdict.left <= 520.0
    assert "Without progress the job ends in 520 s (after --user_code_timeout)." in notice_line(verdict)
    said, ended = look(make, 601.0)
    assert ended
    assert said.said[-1][0] is ReportKind.STALL


@pytest.mark.parametrize("make", [busy, compiling, straggler])
def test_what_is_announced_a_compiler_and_a_slow_worker_never_end_the_job(make: Callable[[], Cluster]) -> None:
    said, ended = look(make, 100_000.0)
    ((kind, verdict),) = said.said
    assert (kind, ended) == (ReportKind.NOTICE, False)
    assert "The job does not end because of this." in notice_line(verdict)


def test_what_cannot_heal_ends_the_job_at_once_and_the_rest_after_stall_after() -> None:
    assert look(dead, 3.0)[1]
    assert not look(frozen, 59.0)[1]
    assert look(frozen, 61.0)[1]
    assert not look(nothing_proven, 59.0)[1]
    assert look(nothing_proven, 61.0)[1]


@pytest.mark.parametrize("make", [dead, stale])
def test_a_loss_from_which_the_job_recovers_does_not_end_it_before_stall_after(make: Callable[[], Cluster]) -> None:
    assert look(make, 3.0)[1]
    assert not look(make, 59.0, recovers=True)[1]
    assert look(make, 61.0, recovers=True)[1]


def test_a_task_that_does_not_answer_once_in_a_long_evaluation_does_not_end_the_job() -> None:
    episode = Episode(0.0)
    assert not look(user_code, 90.0, episode)[1]
    assert not look(nothing_proven, 90.5, episode)[1]
