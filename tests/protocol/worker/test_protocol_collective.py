"""The books of a worker without servers, and what an analysis makes of the books of all."""

from __future__ import annotations

import json

import pytest

from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.evidence import Evidence, Seen
from lockstep.diagnose.fields import FORMAT
from lockstep.diagnose.monitor_view import read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.verdict import Verdict
from lockstep.errors import EXIT_VERDICT
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import Effect, SaveShard, Send
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.events import (
    LinkLost,
    LinkUp,
    Prepared,
    Produced,
    Received,
    Reduced,
    Sealed,
    ShardSaved,
    StateTaken,
    StepBegun,
    Tick,
)
from lockstep.protocol.core.ids import CHIEF, ClusterShape, worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import (
    Applied,
    Commit,
    Layout,
    LocalState,
    Member,
    Message,
    ParameterEntry,
    Saved,
    View,
)
from lockstep.protocol.core.plan import make_plan
from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.phrases import waited_for
from lockstep.protocol.worker.collective_machine import (
    SUMMED_BUCKET_TRANSITIONS,
    CollectiveMachine,
    SummedBucketState,
    SummedBucketTrigger,
)

LIVES = (11, 12, 13)


CHIEF_LIFE = LIVES[0]


def _machine(
    index: int = 0, workers: int = 3, start: int = 4, *, tells_state: bool = False
) -> tuple[CollectiveMachine, Journal]:
    """A worker that is about to begin step ``start``."""
    journal = Journal()
    shape = ClusterShape(0, workers)
    machine = CollectiveMachine(worker(index), shape, journal, 60.0, tells_state=tells_state)
    machine.handle(LinkUp(CHIEF, CHIEF_LIFE), 0.5)
    members = tuple(Member(str(worker(i)), LIVES[i]) for i in range(workers))
    machine.handle(Received(CHIEF, CHIEF_LIFE, View(1, 1, members)), 1.0)
    plan = make_plan([ParameterEntry("p", 16, "float32", 0)], workers)
    layout = Layout(plan.hash, plan.bucket_bytes, plan.parameters, (), start=start)
    machine.handle(Prepared(plan, layout), 1.0)
    return machine, journal


def _hear(machine: CollectiveMachine, message: Message, now: float = 30.0) -> list[Effect]:
    return machine.handle(Received(CHIEF, CHIEF_LIFE, message), now)


def _step(machine: CollectiveMachine, step: int, now: float = 10.0) -> list[Effect]:
    """One step with one bucket; what its sum asks for."""
    machine.handle(StepBegun(step, ()), now)
    machine.handle(Produced(step, 0), now)
    machine.handle(Sealed(step, (), (), state=None), now)
    return machine.handle(Reduced(step, 0), now)


@pytest.mark.parametrize(("pair", "after"), SUMMED_BUCKET_TRANSITIONS.items(), ids=lambda value: str(value))
def test_the_table_is_literal(pair: tuple[SummedBucketState, SummedBucketTrigger], after: SummedBucketState) -> None:
    assert advance(SUMMED_BUCKET_TRANSITIONS, *pair) is after


def test_the_coordinator_is_told_of_every_whole_step_until_it_commits_it() -> None:
    machine, _ = _machine(1)
    assert _step(machine, 4) == [Send(CHIEF, Applied(4))]
    deadline = machine.next_deadline()
    assert deadline is not None
    assert machine.handle(Tick(), deadline) == [Send(CHIEF, Applied(4))]
    assert _hear(machine, Commit(4)) == []
    assert machine.handle(Tick(), deadline + 100.0) == []
    assert machine.committed == 4
    machine.check()


def test_a_step_is_whole_only_when_backward_has_ended_and_those_before_it_are() -> None:
    machine, _ = _machine(1)
    machine.handle(StepBegun(4, ()), 10.0)
    machine.handle(Produced(4, 0), 10.0)
    assert machine.handle(Reduced(4, 0), 11.0) == [], "another bucket may follow"
    machine.handle(Produced(4, 1), 12.0)
    assert machine.handle(Sealed(4, (), (), state=None), 13.0) == []
    machine.handle(StepBegun(5, ()), 14.0)
    machine.handle(Sealed(5, (), (), state=None), 15.0)
    assert machine.handle(Reduced(4, 1), 16.0) == [Send(CHIEF, Applied(5))]


def test_the_local_state_is_told_until_its_step_is_committed_and_only_where_it_differs() -> None:
    machine, _ = _machine(1, tells_state=True)
    _step(machine, 4)
    assert machine.handle(StateTaken(5, b"mine"), 11.0) == [Send(CHIEF, LocalState(5, b"mine"))]
    machine.handle(LinkLost(CHIEF, "cut"), 12.0)
    again = machine.handle(LinkUp(CHIEF, CHIEF_LIFE), 13.0)
    assert again == [Send(CHIEF, Applied(4)), Send(CHIEF, LocalState(5, b"mine"))]
    _hear(machine, Commit(4))
    _step(machine, 5)
    assert machine.handle(StateTaken(6, b"mine"), 15.0) == [Send(CHIEF, LocalState(6, b"", same=True))]


def test_a_version_is_saved_once_and_a_repeated_request_is_answered() -> None:
    machine, _ = _machine(0)
    _step(machine, 4)
    assert _hear(machine, Commit(4, save=True)) == [SaveShard(5)]
    assert _hear(machine, Commit(4, save=True)) == []
    saved = Saved(5, "shard", 1, "hash")
    assert machine.handle(ShardSaved(saved), 20.0) == [Send(CHIEF, saved)]
    assert _hear(machine, Commit(4, save=True)) == [Send(CHIEF, saved)]


def test_steps_that_the_training_loop_mixes_up_are_its_own_fault() -> None:
    machine, _ = _machine()
    with pytest.raises(LocalProtocolError):
        machine.handle(StepBegun(6, ()), 10.0)
    machine.handle(StepBegun(4, ()), 10.0)
    with pytest.raises(LocalProtocolError):
        machine.handle(Produced(5, 0), 10.0)
    with pytest.raises(LocalProtocolError):
        machine.handle(Sealed(5, (), ()), 10.0)
    with pytest.raises(LocalProtocolError):
        machine.handle(StateTaken(6, b""), 10.0)


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


def test_a_worker_without_others_waits_for_its_own_step() -> None:
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
        "machines": {"role": machine.snapshot()},
        "waits": waits,
        "main": {"doing": doing, "detail": "", "seconds": 6.0, "cpu": cpu, "where": "user code", "stack": ["f (x:1)"]},
    }
    return Seen(task=str(machine.task), address="h:1", view=read_task(json.dumps(fields).encode()))


def _at(index: int, handed: int, sealed: bool) -> CollectiveMachine:
    """Worker ``index`` in step 7 of three, with so many of two buckets handed over."""
    machine, _ = _machine(index, start=7)
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
