"""Tasks that leave because of a signal, machine by machine: who is told, who is lost, when a job is shut down."""

from __future__ import annotations

import pytest

from helpers.reasons import because
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, JobEnded, PeerLeaves, Send
from lockstep.protocol.core.events import CheckpointWritten, LinkUp, PeerGone, SignalCame, Tick
from lockstep.protocol.core.ids import INITIAL_STEP, TaskId, server, worker
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import Applied, Commit, End, Leaving, Left, LocalState, Roster, Saved
from lockstep.protocol.core.timing import SIGNAL_WINDOW_SECONDS
from lockstep.protocol.phrases import received
from protocol.protocol_rigs import CoordinatorRig, MemberRig, join_of, life, messages_to, only

PS, W0, W1 = server(0), worker(0), worker(1)
ALL = (PS, W0, W1)
TERM = Departure.SIGTERM
WAIT = RecoveryRules(on_worker_loss=LossPolicy.WAIT)
SAVES = RecoveryRules(saves_last=True, grace_seconds=20.0)


def running(rules: RecoveryRules | None = None) -> CoordinatorRig:
    rig = CoordinatorRig(rules=rules)
    rig.join_all()
    make_step(rig, INITIAL_STEP)
    return rig


def make_step(rig: CoordinatorRig, step: int) -> list[Effect]:
    effects: list[Effect] = []
    if step >= 0:
        for task in (W0, W1):
            effects += rig.hear(task, LocalState(step + 1, b"state"))
    return effects + rig.hear(PS, Applied(step))


def ends(effects: list[Effect]) -> dict[TaskId, list[End]]:
    return {task: messages_to(effects, task, End) for task in ALL}


def window_over(rig: CoordinatorRig) -> list[Effect]:
    deadline = rig.machine.next_deadline()
    assert deadline == rig.now + SIGNAL_WINDOW_SECONDS
    rig.now = deadline
    return rig.tell(Tick())


# -- the coordinator --


@pytest.mark.parametrize("departure", [Departure.SIGINT, Departure.SIGHUP])
@pytest.mark.parametrize("victim", ALL)
def test_a_person_ends_the_job_for_all(departure: Departure, victim: TaskId) -> None:
    rig = running(WAIT)
    found = ends(rig.hear(victim, Leaving(departure)))
    end = End(False, str(victim), 0, Reason(Cause.STOPPED, received(departure)), departure=departure)
    assert found == {key: [end] for key in ALL}


def test_who_leaves_is_told_to_the_others_at_once_and_lost_when_the_window_is_over() -> None:
    rig = running(WAIT)
    told = rig.hear(W1, Leaving(TERM))
    assert told == [Send(task, Left(str(W1), TERM)) for task in (PS, W0)]
    assert rig.hear(W1, Leaving(TERM)) == []  # it says so again, until it may go
    assert not rig.machine.losses.is_lost(W1)
    effects = window_over(rig)
    assert messages_to(effects, W1, Left) == [Left(str(W1), TERM)]
    assert "received SIGTERM and left; waiting" in messages_to(effects, W0, Roster)[0].missing[0].finding
    assert rig.machine.losses.is_lost(W1)
    assert rig.hear(W1, Leaving(TERM)) == [Send(W1, Left(str(W1), TERM))]  # the word was lost


def test_where_no_worker_may_be_lost_the_job_ends_when_the_window_is_over_and_not_before() -> None:
    rig = running()
    rig.hear(W1, Leaving(TERM))
    assert rig.machine.end is None
    found = ends(window_over(rig))
    assert found == {
        PS: (end := [End(False, str(W1), 0, Reason(Cause.DEAD, "received SIGTERM and left"))]),
        W0: end,
        W1: [],
    }


def test_a_server_that_leaves_takes_the_others_back_and_begins_no_other_life_itself() -> None:
    rig = CoordinatorRig(servers=2, rules=RecoveryRules(returns=True))
    rig.join_all()
    rig.hear(server(1), Leaving(TERM))
    effects = window_over(rig)
    assert [end.again for end in messages_to(effects, W0, End)] == [True]
    assert messages_to(effects, server(1), End) == []
    assert messages_to(effects, server(1), Left) == [Left(str(server(1)), TERM)]


def test_who_dies_within_its_window_is_lost_at_once() -> None:
    rig = running(WAIT)
    rig.hear(W1, Leaving(TERM))
    rig.tell(PeerGone(W1, because("was killed by SIGKILL"), life(W1)))
    assert rig.machine.losses.lost[W1].reason.text == "was killed by SIGKILL"


def test_a_signal_while_the_cluster_forms() -> None:
    rig = CoordinatorRig(rules=WAIT)
    for task in (PS, W1):
        rig.hear(task, join_of(task))
    effects = rig.hear(W1, Leaving(TERM))
    assert messages_to(effects, PS, Left) == messages_to(effects, W1, Left) == [Left(str(W1), TERM)]
    assert W1 in rig.machine.missing()
    effects = rig.hear(PS, Leaving(Departure.SIGINT))
    assert [end.departure for end in messages_to(effects, PS, End)] == [Departure.SIGINT]


# -- a whole job is shut down --


def test_the_coordinators_own_end_finishes_the_step_saves_it_and_then_ends_all() -> None:
    rig = running(SAVES)
    make_step(rig, 0)
    rig.hear(W1, Leaving(TERM))
    effects = rig.hear(PS, Leaving(TERM))
    assert ends(effects) == {PS: [], W0: [], W1: []}
    rig.now += SIGNAL_WINDOW_SECONDS  # who left before is not lost: its step is still to be finished
    assert rig.tell(Tick()) == []
    (commit,) = messages_to(make_step(rig, 1), PS, Commit)
    assert commit == Commit(1, save=True)
    rig.hear(PS, Saved(2, "file", 1, "digest"))
    found = ends(rig.tell(CheckpointWritten(2)))
    reason = "received SIGTERM and ended the job; version 2 is saved"
    assert found == {key: [End(False, str(PS), 2, Reason(Cause.STOPPED, reason), departure=TERM)] for key in ALL}


def test_a_step_that_is_not_finished_in_time_is_not_waited_for() -> None:
    rig = running(SAVES)
    make_step(rig, 0)
    rig.hear(PS, Leaving(TERM))
    assert rig.machine.next_deadline() == rig.now + 20.0
    rig.now += 20.0
    (end,) = messages_to(rig.tell(Tick()), W0, End)
    assert (end.departure, end.reason.text) == (
        TERM,
        "received SIGTERM and ended the job; its last steps are not saved",
    )


def test_a_loss_while_it_is_shut_down_ends_it_at_once_and_takes_nobody_back() -> None:
    rig = running(RecoveryRules(saves_last=True, returns=True, on_worker_loss=LossPolicy.WAIT))
    make_step(rig, 0)
    rig.hear(PS, Leaving(TERM))
    (end,) = messages_to(rig.tell(PeerGone(W1, because("was killed by SIGKILL"), life(W1))), W0, End)
    assert (end.departure, end.again) == (TERM, False)


def test_without_checkpoints_a_job_is_shut_down_at_once() -> None:
    (end,) = messages_to(running(WAIT).hear(PS, Leaving(TERM)), W1, End)
    assert (end.departure, end.reason.text) == (TERM, "received SIGTERM and ended the job")


# -- the task itself --


def test_a_task_says_that_it_leaves_until_it_may_go() -> None:
    rig = MemberRig()
    rig.tell(LinkUp(PS, life(PS)))
    assert rig.tell(SignalCame(TERM)) == [Send(PS, Leaving(TERM))]
    assert rig.tell(SignalCame(TERM)) == []
    deadline = rig.machine.next_deadline()
    assert deadline is not None
    rig.now = deadline
    assert Send(PS, Leaving(TERM)) in rig.tell(Tick())
    (ended,) = only(rig.hear(PS, Left(str(rig.machine.task), TERM)), JobEnded)
    assert (ended.departure, ended.alone, ended.reason.text) == (TERM, True, "received SIGTERM and left")


def test_a_task_without_a_link_leaves_at_once() -> None:
    (ended,) = only(MemberRig().tell(SignalCame(Departure.SIGINT)), JobEnded)
    assert (ended.departure, ended.alone) == (Departure.SIGINT, True)


def test_a_task_that_leaves_begins_no_other_life() -> None:
    rig = MemberRig()
    rig.tell(LinkUp(PS, life(PS)))
    rig.tell(SignalCame(TERM))
    (ended,) = only(rig.hear(PS, End(False, str(W1), 3, because("was killed by SIGKILL"), again=True)), JobEnded)
    assert (ended.again, ended.departure) == (False, TERM)


def test_the_others_hear_who_leaves_and_a_signal_of_another_version_says_nothing() -> None:
    rig = MemberRig()
    rig.tell(LinkUp(PS, life(PS)))
    other = W1 if rig.machine.task != W1 else W0
    assert rig.hear(PS, Left(str(other), TERM)) == [PeerLeaves(other, TERM)]
    assert rig.hear(PS, Left(str(other), 99)) == []
