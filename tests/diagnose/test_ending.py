"""What ends a job has its cause from where it is found out."""

from __future__ import annotations

import errno

import pytest

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.core.causes import Cause, Reason, Source
from lockstep.protocol.core.effects import JobEnded, Send
from lockstep.protocol.core.events import LinkUp, Received, Tick
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Description, End, Join, Refused, Setting
from lockstep.protocol.member import MemberMachine
from lockstep.runtime.startup.address_finding import AddressFinding, how_it_ended, proof_of_end
from lockstep.runtime.task.failures import failure_of

SHAPE = ClusterShape(1, 2)
LIFE = 7


def description(**changes: object) -> Description:
    fields = {
        "task": str(worker(1)),
        "host": "h",
        "monitor_pid": 1,
        "pid": 2,
        "incarnation": LIFE,
        "phase": "training",
        "phase_seconds": 1.0,
        "task_address": "h:1",
        "exited": True,
        "exit_code": -9,
        "version": "1",
        "job": 3,
    }
    return Description(**{**fields, **changes})  # type: ignore[arg-type]  # a test names real fields


@pytest.mark.parametrize(("code", "cause"), [(-9, Cause.DEAD), (-11, Cause.DEAD), (7, Cause.DEAD), (-64, Cause.DEAD)])
def test_the_word_of_a_monitor_on_the_end_of_its_task_is_dead(code: int, cause: Cause) -> None:
    found = description(exit_code=code)
    proof = proof_of_end(AddressFinding(how_it_ended(found), found, True), LIFE)
    assert proof is not None
    assert proof.cause is cause


def test_another_life_at_the_address_is_a_stale_incarnation() -> None:
    proof = proof_of_end(AddressFinding("", description(exited=False, incarnation=8), True), LIFE)
    assert proof is not None
    assert proof.cause is Cause.STALE_INCARNATION


def joined(coordinator: CoordinatorMachine, task: TaskId, life: int, **changes: object) -> list[object]:
    fields = {"task": str(task), "incarnation": life, "host": "h", "pid": 1, "settings": ()}
    join = Join(**{**fields, **changes})  # type: ignore[arg-type]  # a test names real fields
    return [e.message for e in coordinator.handle(Received(task, life, join), 1.0) if isinstance(e, Send)]


def test_the_refusals_of_a_coordinator_lead_to_their_causes() -> None:
    coordinator = CoordinatorMachine(SHAPE, 1, Journal(), 0.0)
    joined(coordinator, worker(0), 1)
    (twice,) = joined(coordinator, worker(0), 2)
    assert isinstance(twice, Refused)
    assert twice.reason.cause is Cause.DUPLICATE_TASK
    ends = joined(coordinator, worker(1), 3, settings=(Setting("optimizer", "adam"),))
    assert isinstance(ends[0], End)
    assert ends[0].reason.cause is Cause.MISMATCH


def test_a_running_job_refuses_newcomers_as_a_leftover_would() -> None:
    coordinator = CoordinatorMachine(SHAPE, 1, Journal(), 0.0)
    for life, task in enumerate(SHAPE.tasks()):
        joined(coordinator, task, life + 1)
    (refused,) = joined(coordinator, worker(0), 99)
    assert isinstance(refused, Refused)
    assert refused.reason.cause is Cause.LEFTOVER_SERVER


def test_a_cluster_that_is_never_complete_was_never_started_or_does_not_answer() -> None:
    for linked, cause in ((False, Cause.NEVER_STARTED), (True, Cause.COMMUNICATION)):
        join = Join(str(worker(0)), 1, "h", 1, ())
        member = MemberMachine(worker(0), server(0), join, 5.0, Journal(), 0.0)
        if linked:
            member.handle(LinkUp(server(0), 9), 0.0)
        ended = [effect for effect in member.handle(Tick(), 6.0) if isinstance(effect, JobEnded)]
        assert ended[0].reason.cause is cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), Cause.DISK_FULL),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (ValueError("a text that says: No space left on device, out of memory, was killed by SIGKILL"), Cause.FAILED),
    ],
)
def test_a_tasks_own_error_is_no_verdict_whatever_its_words(error: Exception, cause: Cause) -> None:
    reason = failure_of(error)
    assert reason.cause is cause
    assert reason.own_error
    assert not reason.reported


def test_the_word_of_a_watchdog_is_no_error_of_the_task_that_it_is_about() -> None:
    for source in (Source.VERDICT, Source.STALL):
        reason = Reason(Cause.DEADLOCK, "", source)
        assert reason.reported
        assert not reason.own_error
