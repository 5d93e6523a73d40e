"""What a snapshot shows of a job that is over: values, so that nobody who asks takes it for a healthy one."""

from __future__ import annotations

import json

import pytest

from helpers.snapshots import W0, healthy
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.views import Ended
from lockstep.protocol.core.causes import Cause, Reason, Source
from lockstep.protocol.core.ids import worker
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.watch.snapshot import ended_fields

REASON = Reason(Cause.FROZEN, "was stopped", Source.VERDICT)


def shown(outcome: Outcome | None) -> Ended | None:
    return read_task(json.dumps(healthy().task(W0) | {"ended": ended_fields(outcome)}).encode()).ended


def test_a_verdict_that_has_ended_the_job_is_shown_with_its_cause() -> None:
    assert shown(Outcome(False, str(worker(1)), 7, REASON)) == Ended(str(worker(1)), 7, REASON)


@pytest.mark.parametrize(
    "outcome",
    [None, Outcome(True), Outcome(False, reason=REASON, again=True), Outcome(False, reason=REASON, alone=True)],
)
def test_a_job_that_runs_ended_well_or_goes_on_shows_no_end(outcome: Outcome | None) -> None:
    assert shown(outcome) is None
