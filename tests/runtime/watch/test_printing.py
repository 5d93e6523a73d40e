"""One task prints a report, the others one line; and where the one does not, another does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from helpers.printing import FROZEN, LATE, Task, blaming, received
from helpers.snapshots import W1
from lockstep.protocol.core.causes import Cause, Reason, ReportKind
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.protocol.core.messages import Printed
from lockstep.protocol.core.timing import PRINTED_SECONDS
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.watch.printing import Printing


def test_the_coordinator_prints_and_tells_the_others() -> None:
    task = Task(server(0))
    task.printing.found(ReportKind.VERDICT, FROZEN)
    assert task.shown.printed == ["whole verdict", "told the others of verdict"]
    assert task.told_monitor == 1
    assert task.shown.paged == [ReportKind.VERDICT]
    assert not task.printing.pending


def test_a_task_that_hears_that_a_report_was_printed_prints_one_line() -> None:
    task = Task(worker(0))
    task.printing.told(received(FROZEN))
    assert task.later(0.1) == []
    task.printing.heard_printed(Printed(ReportKind.VERDICT, str(W1)))
    assert task.later(LATE) == ["line: ps 0 has copy"]
    assert task.told_monitor == 0
    assert not task.shown.paged


def test_a_task_that_does_not_hear_it_in_time_prints_the_report_itself() -> None:
    task = Task(worker(0))
    task.printing.told(received(FROZEN))
    assert task.later(PRINTED_SECONDS - 0.1) == []
    assert task.later(PRINTED_SECONDS + 0.1) == ["whole verdict"]
    assert task.told_monitor == 1
    assert task.shown.paged == [ReportKind.VERDICT]


def test_of_those_only_the_first_prints_and_the_next_learns_it_from_its_monitor() -> None:
    task = Task(worker(2), {worker(0): {"printed_seconds": 0.2}, worker(1): {}})
    task.printing.told(received(blaming(server(0))))
    assert task.later(PRINTED_SECONDS - 0.1) == []
    assert task.later(PRINTED_SECONDS + 0.1) == ["line: worker 0 has copy"]


def test_where_the_link_is_lost_before_it_is_told_the_monitor_of_the_coordinator_knows() -> None:
    """The coordinator leaves once it has printed."""
    task = Task(worker(0), {server(0): {"exited": True, "exit_code": 3, "printed_seconds": 0.1}})
    task.printing.told(received(FROZEN))
    task.peers.clear()
    assert task.later(0.0) == ["line: ps 0 has copy"]


@pytest.mark.parametrize("gone", [{}, {worker(0): {"exited": True, "exit_code": 3}}])
def test_a_task_does_not_wait_for_one_that_is_gone(gone: Mapping[TaskId, dict[str, Any]]) -> None:
    task = Task(worker(1), gone)
    task.printing.found(ReportKind.VERDICT, blaming(server(0)))
    assert task.later(0.0) == ["whole verdict"]


def test_a_task_that_left_after_it_printed_counts() -> None:
    task = Task(worker(1), {worker(0): {"exited": True, "exit_code": 3, "printed_seconds": 1.0}})
    task.printing.found(ReportKind.VERDICT, blaming(server(0)))
    assert task.later(0.0) == ["line: worker 0 has copy"]


def test_a_living_task_that_knows_of_nothing_is_not_waited_for_longer_than_promised() -> None:
    task = Task(worker(2), {worker(0): {}, worker(1): {}})
    task.printing.found(ReportKind.VERDICT, blaming(server(0)))
    assert task.later(PRINTED_SECONDS) == []
    assert task.later(LATE) == ["whole verdict"]


def test_a_fault_that_still_holds_is_one_line_and_after_progress_a_report_again() -> None:
    task = Task(server(0))
    task.printing.found(ReportKind.VERDICT, FROZEN)
    task.printing.found(ReportKind.VERDICT, FROZEN)
    task.printing.found(ReportKind.STALL, replace(FROZEN, ends=True))
    shown = [line for line in task.shown.printed if not line.startswith("told")]
    assert shown == ["whole verdict", "again stall"]
    task.printing.forget()
    task.printing.found(ReportKind.VERDICT, FROZEN)
    assert task.shown.printed[-2] == "whole verdict"


def test_another_fault_is_another_report() -> None:
    task = Task(server(0))
    task.printing.found(ReportKind.VERDICT, FROZEN)
    task.printing.found(ReportKind.VERDICT, blaming(worker(1), Cause.DEAD))
    assert task.shown.printed.count("whole verdict") == 2


def test_a_notice_is_one_line_everywhere_and_waits_for_nobody() -> None:
    task = Task(worker(0))
    task.printing.told(received(FROZEN, ReportKind.NOTICE))
    assert task.shown.printed == ["notice"]
    assert not task.printing.pending


def outcome(culprit: TaskId, **changes: object) -> Outcome:
    return replace(Outcome(False, str(culprit), 5, Reason(Cause.FROZEN)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "learn",
    [
        lambda printing: printing.told(received(FROZEN)),
        lambda printing: printing.found(ReportKind.VERDICT, FROZEN),
        lambda printing: printing.will_explain(str(worker(1))),
    ],
    ids=["told", "found", "about to come"],
)
def test_an_end_that_a_report_explains_needs_no_further_line(learn: Callable[[Printing], None]) -> None:
    task = Task(worker(0))
    assert not task.printing.explains(outcome(worker(1)))
    learn(task.printing)
    assert task.printing.explains(outcome(worker(1)))
    assert not task.printing.explains(outcome(worker(0))), "an end with another culprit is still to be told"
    assert not task.printing.explains(outcome(worker(1), again=True))
