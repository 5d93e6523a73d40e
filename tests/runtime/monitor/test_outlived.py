"""When a monitor ends a task that has outlived its job, and when it must not. No processes here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from helpers.waiting import wait_until
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.protocol.core.timing import MUTE_SECONDS, OTHERS_GONE_SECONDS, OVERSTAY_SECONDS
from lockstep.runtime.monitor.outlived import Outlived, has_left
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport, TaskReporter, decode_report, encode_report
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.task.end_guard import EndGuard
from lockstep.runtime.task.outcome import Outcome

JOB = 7
REPORT = TaskReport(job=JOB)


class Rig:
    """One monitor's view of its own task, and another monitor, a real one, that may have left."""

    def __init__(self, task: TaskId) -> None:
        self.other = TaskRecord(str(server(0)), "0.0.test", 1)
        self.other.on_report(REPORT)
        self.service = MonitorService("127.0.0.1", 0, self.other)
        self.record = TaskRecord(str(task), "0.0.test", 1)
        cluster = [(str(server(0)), self.service.address), (str(worker(1)), "127.0.0.1:1")]
        self.outlived = Outlived(task, self.record, cluster, has_left)

    def mute(self, seconds: float, report: TaskReport = REPORT) -> None:
        """The task's last sign of life is that old."""
        self.record.on_report(report)
        self.record._heard_at -= seconds

    def asked(self) -> bool:
        """Look once, and once more when the others have answered."""
        self.outlived.look(time.monotonic())
        asking = self.outlived._asking
        if asking is not None:
            asking.join(10.0)
        return self.outlived.look(time.monotonic() + OTHERS_GONE_SECONDS)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(worker(1))
    yield made
    made.service.close()


def test_a_mute_task_is_ended_when_all_others_have_left(rig: Rig) -> None:
    rig.mute(MUTE_SECONDS)
    rig.other.on_exited(3)
    assert rig.asked()


def test_it_is_ended_when_nothing_listens_there_any_more_or_another_job_does(rig: Rig) -> None:
    rig.mute(MUTE_SECONDS)
    rig.other.on_report(replace(REPORT, job=JOB + 1))
    assert rig.asked()
    assert has_left("127.0.0.1:1", JOB)


def test_a_stopped_task_stays_as_long_as_its_job_runs(rig: Rig) -> None:
    rig.mute(1000.0)
    assert not rig.asked()


@pytest.mark.parametrize("report", [TaskReport(), replace(REPORT, over=True)], ids=["no member yet", "winding up"])
def test_a_mute_task_that_is_starting_or_winding_up_is_left_alone(rig: Rig, report: TaskReport) -> None:
    rig.mute(1000.0, report)
    rig.other.on_exited(0)
    assert not rig.asked()


def test_a_task_that_gives_signs_of_life_is_left_alone(rig: Rig) -> None:
    rig.mute(0.0)
    rig.other.on_exited(0)
    assert not rig.asked()


def test_a_worker_that_does_not_get_out_after_a_failed_job_is_ended(rig: Rig) -> None:
    rig.mute(0.0, replace(REPORT, over=True, must_leave=True))
    assert not rig.outlived.look(100.0)
    assert not rig.outlived.look(100.0 + OVERSTAY_SECONDS - 0.1)
    assert rig.outlived.look(100.0 + OVERSTAY_SECONDS)


def test_a_server_may_take_its_time_to_write_a_checkpoint() -> None:
    made = Rig(server(0))
    made.mute(0.0, replace(REPORT, over=True, must_leave=True))
    made.outlived.look(100.0)
    assert not made.outlived.look(1000.0)
    made.service.close()


def test_what_is_over_travels_to_the_monitor_and_a_new_incarnation_is_not_over() -> None:
    reporter = TaskReporter.none()
    reporter.over(must_leave=True)
    reporter.over(must_leave=False)
    told = decode_report(encode_report(reporter.report))
    assert told is not None
    assert (told.over, told.must_leave) == (True, True)
    reporter.ready("here:1", 2, JOB)
    assert not reporter.report.over


def test_a_training_thread_that_does_not_notice_a_failed_job_ends_with_its_process() -> None:
    given_up, said = threading.Event(), list[str]()
    guard = EndGuard(lambda: "it hangs", said.append, TaskReporter.none())
    guard.on_end(Outcome(False), 0.05, lambda _outcome: given_up.set())
    wait_until(given_up.is_set, 10, "it is given up")
    assert said == ["it hangs"]


@pytest.mark.parametrize("ok", [True, False], ids=["the job ended well", "it noticed"])
def test_one_that_notices_or_whose_job_ended_well_is_not_forced(ok: bool) -> None:
    said = list[str]()
    guard = EndGuard(lambda: "it hangs", said.append, TaskReporter.none())
    if not ok:
        guard.on_close()
    before = threading.active_count()
    guard.on_end(Outcome(ok), 0.05, lambda _outcome: said.append("given up"))
    wait_until(lambda: threading.active_count() <= before, 10, "the guard is gone")
    assert said == []


def test_a_program_in_a_block_that_it_announced_is_not_cut_off_before_the_block_ends() -> None:
    looked, given_up = list[int](), threading.Event()
    reporter = TaskReporter.none()
    guard = EndGuard(lambda: "it hangs", lambda _line: None, reporter)

    def spared() -> bool:
        looked.append(1)
        return len(looked) < 3

    guard.on_end(Outcome(False), 0.01, lambda _outcome: given_up.set(), spared)
    wait_until(given_up.is_set, 10, "it is given up")
    assert len(looked) == 3
    assert (reporter.report.over, reporter.report.must_leave) == (True, False)  # its monitor leaves it alone
