"""What several drills come to: one wrong answer shows off the diagonal, and one that never came counts as the worst."""

from __future__ import annotations

import pytest

from lockstep.drill.catalogue import DRILLS, find
from lockstep.drill.judgement import Event, cause_said, hear, problems_of
from lockstep.drill.matrix import DrillSum, Times
from lockstep.drill.model import PS0, W1, Drill
from lockstep.drill.result import DrillResult, DrillStatus
from lockstep.errors import BadInput
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.timing import PROMISE_SECONDS

COLUMNS = 120
STRUCK = 1000.0


def passed(name: str, cause: str = "", seconds: float | None = None, *, fooled: bool = False) -> DrillResult:
    return DrillResult(
        name=name, status=DrillStatus.PASSED, struck=cause, said=cause, notice_seconds=seconds, fooled=fooled
    )


def event(
    kind: ReportKind, cause: Cause, culprit: str = W1, *, seconds: float = 1.0, key: str = "", step: int = -2
) -> Event:
    """One report, as the tasks write it."""
    named = {"culprit": culprit, "peer": "", "key": key, "step": step}
    return {"time": STRUCK + seconds, "kind": kind.value, "cause": cause.value, **named}


def judged(drill: Drill, *events: Event) -> DrillResult:
    """The result of a drill in which this was reported."""
    result = DrillResult(name=drill.name, struck=drill.cause.value, said=cause_said(drill, events, STRUCK))
    hear(drill, result, events, STRUCK)
    result.conclude(problems_of(drill, result, events))
    return result


def test_a_wrong_answer_stands_off_the_diagonal() -> None:
    wrong = judged(find("link-cut"), event(ReportKind.VERDICT, Cause.DEAD))
    right = judged(find("server-killed"), event(ReportKind.VERDICT, Cause.DEAD, PS0))
    assert (right.status, wrong.status) == (DrillStatus.PASSED, DrillStatus.FAILED)
    in_sum = DrillSum.of([right, wrong, passed("workers-first")])
    assert in_sum.lines()[3:7] == [
        "  a b c",
        "  1 . .  a = nothing",
        "  . 1 .  b = dead",
        "  . 1 .  c = link down  <- WRONG",
    ]
    assert in_sum.wrong == ("link-cut",)
    assert {"struck": "link down", "said": "dead", "drills": 1} in in_sum.to_fields()["matrix"]
    assert "2 of 3 drills went as expected." in in_sum.lines()


def test_a_right_answer_that_comes_late_is_wrong_too() -> None:
    late = judged(find("server-killed"), event(ReportKind.VERDICT, Cause.DEAD, PS0, seconds=PROMISE_SECONDS + 1))
    in_sum = DrillSum.of([late, passed("workers-first")])
    assert in_sum.wrong == ("server-killed",)
    assert in_sum.counts[Cause.DEAD.value, Cause.DEAD.value] == 1
    assert not in_sum.of_all.kept


@pytest.mark.parametrize(
    ("name", "events", "said"),
    [
        ("workers-first", [event(ReportKind.VERDICT, Cause.UNKNOWN)], Cause.UNKNOWN),
        ("workers-first", [event(ReportKind.NOTICE, Cause.UNKNOWN)], ""),
        ("link-cut", [], ""),
        ("link-cut", [event(ReportKind.NOTICE, Cause.SLOW_LINK)], Cause.SLOW_LINK),
        (
            "link-cut",
            [event(ReportKind.NOTICE, Cause.UNKNOWN), event(ReportKind.VERDICT, Cause.LINK_DOWN)],
            Cause.LINK_DOWN,
        ),
        (
            "link-cut",
            [event(ReportKind.NOTICE, Cause.UNKNOWN), event(ReportKind.VERDICT, Cause.DEAD)],
            Cause.DEAD,
        ),
        ("link-cut", [event(ReportKind.VERDICT, Cause.DEAD, seconds=-5.0)], ""),
        (
            "link-reset",
            [event(ReportKind.VERDICT, Cause.LINK_DOWN), event(ReportKind.STALL, Cause.UNKNOWN)],
            Cause.UNKNOWN,
        ),
        (
            "large-packets-lost",
            [event(ReportKind.VERDICT, Cause.LINK_DOWN), event(ReportKind.VERDICT, Cause.DEAD)],
            Cause.DEAD,
        ),
        ("worker-restarted", [event(ReportKind.VERDICT, Cause.DEAD)], Cause.DEAD),
    ],
    ids=[
        "alarm in a healthy job",
        "a notice is no alarm",
        "nothing",
        "only a wrong notice",
        "a notice, then the right verdict",
        "a notice, then a wrong verdict",
        "before the fault",
        "a second alarm in a job that goes on",
        "two answers where one is right",
        "the other right cause",
    ],
)
def test_what_was_said_is_the_wrong_report_where_one_counts(name: str, events: list[Event], said: str) -> None:
    assert cause_said(find(name), events, STRUCK) == said


def test_seconds_are_summed_up_over_all_and_over_those_that_had_fooled_us() -> None:
    results = [passed(f"quick-{n}", Cause.DEAD, float(n)) for n in range(1, 10)]
    in_sum = DrillSum.of([*results, passed("fooled", Cause.FROZEN, 12.0, fooled=True), passed("healthy")])
    assert in_sum.of_all == Times(10, 5.0, 9.0, 12.0)
    assert in_sum.of_fooled == Times(1, 12.0, 12.0, 12.0)
    assert in_sum.lines()[-2:] == [
        "  all                10     5.0     9.0    12.0  MISSED",
        "  had fooled us       1    12.0    12.0    12.0  MISSED",
    ]


def test_a_fault_that_is_never_reported_counts_as_the_worst() -> None:
    silent = judged(find("worker-killed"))
    assert silent.status is DrillStatus.FAILED
    in_sum = DrillSum.of([passed("quick", Cause.FROZEN, 2.0), silent])
    assert in_sum.of_all.line("all").split()[1:] == ["2", "2.0", "never", "never", "MISSED"]
    assert in_sum.to_fields()["first_report_seconds"]["all"]["p90"] is None


def test_what_is_skipped_is_named_and_not_counted() -> None:
    skipped = DrillResult(name="link-cut")
    skipped.skip("network namespaces need root")
    in_sum = DrillSum.of([skipped, passed("workers-first")])
    assert (in_sum.skipped, in_sum.wrong, in_sum.counts.total()) == (("link-cut",), (), 1)
    assert in_sum.of_all.line("all") == "  all            no drill"


def test_the_whole_catalogue_fits_on_a_screen() -> None:
    results = [passed(d.name, "" if d.kind is None else d.cause.value, 2.0, fooled=d.fooled) for d in DRILLS]
    lines = DrillSum.of(results).lines()
    assert [line for line in lines if len(line) > COLUMNS or "WRONG" in line] == []
    assert sum(" = " in line for line in lines) == len({result.struck for result in results})


def test_a_larger_cluster_starts_more_slowly_and_a_smaller_one_is_refused() -> None:
    drill = find("never-started")
    larger = drill.sized(2, 62)
    assert (larger.servers, larger.workers) == (2, 62)
    assert larger.proof_takes == larger.startup_timeout > drill.startup_timeout
    assert drill.sized(0, 0) == drill
    with pytest.raises(BadInput, match="needs at least --ps=2 and --workers=2"):
        find("link-cut").sized(1, 0)
