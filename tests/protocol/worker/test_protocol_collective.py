"""The books of a worker without servers, and what an analysis makes of the books of all."""

from __future__ import annotations

import json

from helpers.reasons import because
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.evidence import Evidence, Seen
from lockstep.diagnose.fields import FORMAT
from lockstep.diagnose.monitor_view import read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.verdict import Verdict
from lockstep.errors import EXIT_VERDICT
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import JobEnded
from lockstep.protocol.core.events import Awaited, Broken, Finished, Met, Produced, Reduced, Sealed, StepBegun
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.phrases import waited_for
from lockstep.protocol.worker.collective_machine import CollectiveMachine

LIVES = (11, 12, 13)


def _machine(index: int = 0, workers: int = 3) -> tuple[CollectiveMachine, Journal]:
    journal = Journal()
    machine = CollectiveMachine(worker(index), LIVES[index], workers, 60.0, journal, 0.0)
    machine.handle(Met(LIVES[:workers]), 1.0)
    return machine, journal


def test_a_worker_waits_for_whoever_is_missing_before_they_meet() -> None:
    machine = CollectiveMachine(worker(0), 11, 3, 60.0, Journal(), 0.0)
    machine.handle(Awaited((worker(2),)), 1.0)
    (wait,) = machine.waits()
    assert (wait.on, waited_for(wait), wait.since) == (worker(2), "it to join", 0.0)
    machine.handle(Met(LIVES), 2.0)
    assert machine.waits() == []


def test_a_bucket_holds_nobody_up_before_backward_has_ended() -> None:
    machine, _ = _machine()
    machine.handle(StepBegun(4, ()), 10.0)
    machine.handle(Produced(4, 0), 11.0)
    assert machine.waits() == []
    machine.handle(Sealed(4, (), ()), 13.0)
    waits = machine.waits()
    assert [wait.on for wait in waits] == [worker(1), worker(2)]
    assert {wait.since for wait in waits} == {13.0}
    assert waited_for(waits[0]) == f"{worker(1)};{12:016x};{worker(0)};allreduce/bucket_0;0:0"
    assert waits[0].deadline == 73.0


def test_the_oldest_bucket_that_is_not_summed_is_waited_for() -> None:
    machine, journal = _machine()
    machine.handle(StepBegun(4, ()), 10.0)
    for bucket in range(3):
        machine.handle(Produced(4, bucket), 11.0)
    machine.handle(Sealed(4, (), ()), 12.0)
    machine.handle(Reduced(4, 0), 12.5)
    assert all("bucket_1" in waited_for(wait) for wait in machine.waits())
    machine.handle(Reduced(4, 1), 12.6)
    machine.handle(Reduced(4, 2), 12.7)
    assert machine.waits() == []
    machine.check()
    told = [(row.happening, row.step, row.bucket) for row in journal][-3:]
    assert told == [(Happening.ARRIVED, 5, bucket) for bucket in range(3)]


def test_a_device_that_is_behind_is_still_waited_for_in_the_next_step() -> None:
    machine, _ = _machine()
    for step in (4, 5):
        machine.handle(StepBegun(step, ()), 10.0 + step)
        machine.handle(Produced(step, 0), 10.0 + step)
        machine.handle(Sealed(step, (), ()), 10.5 + step)
    assert {wait.step for wait in machine.waits()} == {4}
    machine.handle(Reduced(4, 0), 16.0)
    assert {wait.step for wait in machine.waits()} == {5}


def test_the_end_is_waited_for_and_a_break_ends_once() -> None:
    machine, _ = _machine()
    machine.handle(StepBegun(4, ()), 10.0)
    machine.handle(Finished(5), 12.0)
    assert {waited_for(wait) for wait in machine.waits()} == {"the end of the job"}
    broken = Broken(worker(1), 4, because("verdict: dead"))
    assert machine.handle(broken, 13.0) == [JobEnded(False, str(worker(1)), 4, because("verdict: dead"))]
    assert machine.handle(broken, 14.0) == []
    assert machine.waits() == []


def test_a_process_alone_waits_for_its_own_step() -> None:
    machine, _ = _machine(workers=1)
    assert machine.waits() == []
    machine.handle(StepBegun(4, ()), 10.0)
    (wait,) = machine.waits()
    assert (wait.on, wait.since, wait.step) == (worker(0), 10.0, 4)
    machine.handle(Sealed(4, (), ()), 12.0)
    assert machine.waits() == []


# -- the books of all, compared --


def _seen(machine: CollectiveMachine, now: float, doing: str, cpu: float = 0.0) -> Seen:
    waits = [
        {
            "on": str(wait.on),
            "kind": wait.kind.value,
            "key": "" if wait.key is None else str(wait.key),
            "what": waited_for(wait),
            "step": wait.step,
            "seconds": now - wait.since,
            "state": wait.state,
            "bucket": wait.bucket,
            "names": ["conv1.weight"],
        }
        for wait in machine.waits()
    ]
    fields = {
        "format": FORMAT,
        "kind": "task",
        "task": str(machine.task),
        "step": machine.step,
        "machines": machine.snapshot(),
        "waits": waits,
        "main": {"doing": doing, "detail": "", "seconds": 6.0, "cpu": cpu, "where": "user code", "stack": ["f (x:1)"]},
    }
    return Seen(task=str(machine.task), address="h:1", view=read_task(json.dumps(fields).encode()))


def _at(index: int, handed: int, sealed: bool) -> CollectiveMachine:
    """Worker ``index`` in step 7 of three, with so many of two buckets handed over."""
    machine, _ = _machine(index)
    machine.handle(StepBegun(7, ()), 100.0)
    for bucket in range(handed):
        machine.handle(Produced(7, bucket), 101.0)
    if sealed:
        machine.handle(Sealed(7, (), ()), 102.0)
    return machine


def _verdict(*seen: Seen) -> Verdict:
    verdict = analyse(Evidence(tasks={one.task: one for one in seen})).verdict
    assert verdict is not None
    return verdict


def test_the_worker_that_has_not_handed_over_is_the_culprit_and_nobody_else() -> None:
    late = _verdict(
        _seen(_at(0, 2, True), 110.0, "waiting"),
        _seen(_at(1, 0, False), 110.0, "computing"),
        _seen(_at(2, 2, True), 110.0, "waiting"),
    )
    assert (late.cause, late.culprit, late.step) == (Cause.USER_CODE, str(worker(1)), 7)
    assert late.names == ("conv1.weight",)
    assert "allreduce/bucket_0" in late.key


def test_input_that_starves_a_worker_is_the_cause() -> None:
    behind = _at(1, 0, False)
    verdict = _verdict(
        _seen(_at(0, 2, True), 110.0, "waiting"),
        _seen(behind, 110.0, "input"),
        _seen(_at(2, 2, True), 110.0, "waiting"),
    )
    assert (verdict.cause, verdict.culprit) == (Cause.INPUT_STARVED, str(worker(1)))


def test_a_sum_that_everybody_waits_for_hangs_in_the_network() -> None:
    verdict = _verdict(*(_seen(_at(index, 2, True), 110.0, "waiting") for index in range(3)))
    assert verdict.cause is Cause.COMMUNICATION
    assert "all workers have handed over bucket 0 (conv1.weight) of step 7" in verdict.what


def test_a_stopped_worker_is_known_by_its_monitor() -> None:
    monitor = {
        "format": FORMAT,
        "kind": "monitor",
        "description": {"task": str(worker(1)), "host": "b", "pid": 77, "version": ""},
        "process": {"state": "stopped"},
        "stopped_seconds": 6.0,
    }
    silent = Seen(task=str(worker(1)), silence=Silence(Reach.MUTE), monitor=read_monitor(json.dumps(monitor).encode()))
    verdict = _verdict(_seen(_at(0, 2, True), 110.0, "waiting"), silent, _seen(_at(2, 2, True), 110.0, "waiting"))
    assert (verdict.cause, verdict.culprit, verdict.pid) == (Cause.FROZEN, str(worker(1)), 77)


def _exited(index: int, code: int) -> Seen:
    monitor = {
        "format": FORMAT,
        "kind": "monitor",
        "description": {"task": str(worker(index)), "host": "b", "pid": 70 + index, "exited": True, "exit_code": code},
    }
    silence = Silence(Reach.BROKEN)
    return Seen(task=str(worker(index)), silence=silence, monitor=read_monitor(json.dumps(monitor).encode()))


def test_who_left_because_of_a_verdict_is_not_the_culprit_for_who_comes_late() -> None:
    late = _seen(_at(2, 2, True), 110.0, "waiting")
    verdict = _verdict(_exited(0, EXIT_VERDICT), _exited(1, -9), late)
    assert (verdict.cause, verdict.culprit) == (Cause.DEAD, str(worker(1)))
    assert "was killed by SIGKILL" in verdict.what
    alone = _verdict(_exited(0, EXIT_VERDICT), _seen(_at(1, 2, True), 110.0, "waiting"), late)
    assert (alone.cause, alone.culprit) == (Cause.DEAD, str(worker(0))), "where there is nothing else to tell"
