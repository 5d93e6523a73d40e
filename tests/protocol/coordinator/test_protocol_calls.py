"""Calls at the coordinator: who has come, who differs, what a worker that comes back is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from helpers.reasons import because
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.calls import KEPT_CALL_BYTES, MOST_CALL_BYTES, MOST_NAMED, OUTSIDE_LOOPS, most_bytes
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.events import PeerGone
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.protocol.core.messages import (
    Applied,
    CallComplete,
    CallMade,
    CallOpen,
    CallPlace,
    Done,
    End,
    LocalState,
    Message,
)
from lockstep.protocol.core.waits import WaitKind
from protocol.protocol_rigs import CoordinatorRig, join_of, life, messages_to

PS, W0, W1, W2 = server(0), worker(0), worker(1), worker(2)
WAIT = RecoveryRules(on_worker_loss=LossPolicy.WAIT, rejoin_seconds=50.0)
SHRINK = RecoveryRules(on_worker_loss=LossPolicy.SHRINK, rejoin_seconds=50.0)
AGAIN = 4242
"""Another life of worker 1."""


def call(loop: int = 0, iteration: int = OUTSIDE_LOOPS, number: int = 0, data: bytes = b"v") -> CallMade:
    return CallMade(CallPlace(loop, iteration, number), "all_reduce", "mean of a number", "loss", "train.py:31", data)


def running(rules: RecoveryRules | None = None, workers: int = 2) -> CoordinatorRig:
    rig = CoordinatorRig(rules=rules, workers=workers)
    rig.join_all()
    return rig


def ended(effects: Sequence[Effect]) -> End:
    return messages_to(effects, W0, End)[0]


def test_a_call_is_complete_when_all_have_come_and_its_values_are_in_their_order() -> None:
    rig = running(workers=3)
    for index in (2, 0):
        assert rig.hear(worker(index), call(data=b"%d" % index)) == []
    effects = rig.hear(W1, call(data=b"1"))
    answer = CallComplete(call().place, (0, 1, 2), (b"0", b"1", b"2"))
    for task in (W0, W1, W2):
        assert messages_to(effects, task, CallComplete) == [answer]


def test_who_asks_again_is_told_who_is_missing_and_later_the_answer() -> None:
    rig = running(workers=3)
    rig.hear(W0, call())
    assert messages_to(rig.hear(W0, call()), W0, CallOpen) == [CallOpen(call().place, (1, 2))]
    rig.hear(W2, call())
    held = replace(call(), data=b"", held=True)
    assert messages_to(rig.hear(W0, held), W0, CallOpen) == [CallOpen(call().place, (1,))]
    assert [(wait.kind, wait.on) for wait in rig.machine.waits()] == [(WaitKind.CALLER, W1)]
    (answer,) = messages_to(rig.hear(W1, call()), W0, CallComplete)
    assert rig.machine.waits() == []
    assert messages_to(rig.hear(W0, held), W0, CallComplete) == [answer]


def test_only_some_of_many_missing_workers_are_named() -> None:
    rig = running(workers=3 * MOST_NAMED)
    rig.hear(W0, call())
    (answer,) = messages_to(rig.hear(W0, call()), W0, CallOpen)
    assert answer.workers == tuple(range(1, 1 + MOST_NAMED))
    assert len(rig.machine.waits()) == MOST_NAMED


@pytest.mark.parametrize(
    "other",
    [
        replace(call(), operation="barrier"),
        replace(call(), form="sum of a number"),
        replace(call(), name="other"),
        call(number=1),
        call(loop=1, iteration=3),
    ],
    ids=["operation", "form", "name", "number", "place"],
)
@pytest.mark.parametrize("first", [W0, W1], ids=str)
def test_two_workers_in_different_calls_end_the_job_by_name(other: CallMade, first: TaskId) -> None:
    rig = running()
    made = {W0: call(), W1: replace(other, where="train.py:40")}
    second = W1 if first == W0 else W0
    rig.hear(first, made[first])
    end = ended(rig.hear(second, made[second]))
    assert (end.ok, end.culprit, end.reason.cause) == (False, str(second), Cause.OTHER_CALL)
    assert "train.py:31" in end.reason.text
    assert "train.py:40" in end.reason.text
    assert end.reason.peer == str(first)


def test_the_line_may_differ_where_the_name_is_the_same() -> None:
    rig = running()
    rig.hear(W0, call())
    assert messages_to(rig.hear(W1, replace(call(), where="train.py:40")), W0, CallComplete)


@pytest.mark.parametrize("finishes_first", [True, False])
def test_a_worker_that_has_finished_does_not_come(finishes_first: bool) -> None:
    rig = running()
    told: list[tuple[TaskId, Message]] = [(W1, Done(3)), (W0, call())]
    first, second = told if finishes_first else told[::-1]
    assert rig.hear(*first) == []
    end = ended(rig.hear(*second))
    assert (end.culprit, end.reason.cause) == (str(W1), Cause.OTHER_CALL)
    assert "worker 1 has finished, but worker 0 is waiting for it in all_reduce 'loss' (train.py:31)" in end.reason.text


def test_a_call_after_the_end_is_answered_with_the_end() -> None:
    rig = running()
    rig.hear(W0, Done(3))
    rig.hear(W1, Done(3))
    assert ended(rig.hear(W0, call())).ok


def test_more_than_a_call_may_carry_is_not_kept() -> None:
    rig = running()
    assert rig.hear(W0, call(data=bytes(MOST_CALL_BYTES + 1))) == []
    assert rig.machine.waits() == []
    assert most_bytes(2) == MOST_CALL_BYTES
    assert most_bytes(64) == MOST_CALL_BYTES // 8


# -- workers that come back --


def make_all(rig: CoordinatorRig, made: CallMade, life_of_1: int | None = None) -> CallComplete:
    rig.hear(W0, made)
    return messages_to(rig.hear(W1, made, life_of_1), W1, CallComplete)[0]


def commit(rig: CoordinatorRig, step: int) -> None:
    for index in range(2):
        rig.hear(worker(index), LocalState(step + 1, b"state"))
    rig.hear(PS, Applied(step))
    assert rig.machine.committed == step


def come_back(rig: CoordinatorRig) -> None:
    rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    rig.hear(W1, replace(join_of(W1), incarnation=AGAIN), AGAIN)


def test_a_worker_that_comes_back_is_told_what_was_answered_and_then_takes_part() -> None:
    rig = running(WAIT)
    rig.hear(PS, Applied(-1))
    before, inside = make_all(rig, call()), make_all(rig, call(1, 0))
    rig.hear(W0, call(1, 0, 1, data=b"0"))
    come_back(rig)
    assert messages_to(rig.hear(W1, call(), AGAIN), W1, CallComplete) == [before]
    assert messages_to(rig.hear(W1, call(1, 0), AGAIN), W1, CallComplete) == [inside]
    answer = CallComplete(CallPlace(1, 0, 1), (0, 1), (b"0", b"1"))
    assert messages_to(rig.hear(W1, call(1, 0, 1, b"1"), AGAIN), W0, CallComplete) == [answer]


def test_a_call_may_be_complete_before_one_who_made_it_is_back() -> None:
    rig = running(WAIT)
    rig.hear(PS, Applied(-1))
    rig.hear(W1, call(data=b"1"))
    rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    assert messages_to(rig.hear(W0, call(data=b"0")), W0, CallComplete)[0].values == (b"0", b"1")


def test_what_a_former_life_says_is_not_heard() -> None:
    rig = running(WAIT)
    rig.hear(PS, Applied(-1))
    come_back(rig)
    rig.hear(W0, call())
    assert rig.hear(W1, call()) == []


def test_calls_of_a_step_that_nobody_can_come_back_to_are_forgotten_and_others_kept() -> None:
    rig = running(WAIT)
    rig.hear(PS, Applied(-1))
    outside = make_all(rig, call())
    for step in range(4):
        make_all(rig, call(1, step))
        commit(rig, step)
    make_all(rig, call(1, 4))
    kept = [one.made.place for one in rig.machine.calls.kept.after(0)]
    assert kept == [outside.place, *(CallPlace(1, step, 0) for step in (3, 4))]
    come_back(rig)
    assert messages_to(rig.hear(W1, call(), AGAIN), W1, CallComplete) == [outside]


def test_where_nobody_comes_back_only_the_last_answer_is_kept() -> None:
    rig = running()
    for step in range(4):
        make_all(rig, call(1, step))
    assert [one.made.place for one in rig.machine.calls.kept.after(0)] == [CallPlace(1, 3, 0)]


def test_a_worker_that_comes_back_to_what_is_forgotten_ends_the_job_by_name() -> None:
    rig = running(WAIT)
    rig.hear(PS, Applied(-1))
    count = KEPT_CALL_BYTES // MOST_CALL_BYTES
    for number in range(count):
        make_all(rig, call(number=number, data=bytes(MOST_CALL_BYTES)))
    come_back(rig)
    end = ended(rig.hear(W1, call(data=bytes(MOST_CALL_BYTES)), AGAIN))
    assert (end.culprit, end.reason.cause) == (str(W1), Cause.OTHER_CALL)
    assert "no longer kept: at most 16 MiB" in end.reason.text


def test_a_worker_that_comes_back_and_does_something_else_is_named() -> None:
    rig = running(WAIT)
    rig.hear(PS, Applied(-1))
    make_all(rig, call())
    come_back(rig)
    end = ended(rig.hear(W1, replace(call(), name="other"), AGAIN))
    assert (end.culprit, end.reason.cause) == (str(W1), Cause.OTHER_CALL)


def test_a_job_that_goes_on_without_a_worker_does_not_wait_for_it() -> None:
    rig = running(SHRINK)
    rig.hear(PS, Applied(-1))
    rig.hear(W0, call(data=b"0"))
    effects = rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    assert messages_to(effects, W0, CallComplete) == [CallComplete(call().place, (0,), (b"0",))]
