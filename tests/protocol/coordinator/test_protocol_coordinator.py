"""The coordinator's machine: who may take part, when a step is committed, how the job ends."""

from __future__ import annotations

import pytest

from helpers.reasons import because
from lockstep.protocol.coordinator.coordinator_machine import JOB_PHASE_TRANSITIONS, JobPhase
from lockstep.protocol.core.causes import NO_REASON, Cause, Reason
from lockstep.protocol.core.effects import Send
from lockstep.protocol.core.events import Broken, LinkLost, LinkUp, PeerGone, Searched, Tick
from lockstep.protocol.core.ids import INITIAL_STEP, Role, TaskId, server, worker
from lockstep.protocol.core.messages import (
    Applied,
    Commit,
    Contributors,
    Done,
    End,
    Failed,
    Member,
    Message,
    MissingTask,
    Refused,
    Roster,
    Seal,
    View,
)
from lockstep.protocol.core.setting_names import SERVER_DEVICE
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.phrases import waited_for
from protocol.protocol_rigs import JOB, CoordinatorRig, join_of, life, messages_to

PS, W0, W1 = server(0), worker(0), worker(1)


def running(servers: int = 1, workers: int = 2, aggregate: int | None = None) -> CoordinatorRig:
    rig = CoordinatorRig(servers=servers, workers=workers, aggregate=aggregate)
    rig.join_all()
    return rig


# -- forming --


def test_the_view_goes_to_everybody_when_the_last_task_has_joined() -> None:
    rig = CoordinatorRig()
    assert rig.join(W1) == rig.join(PS) == []
    members = tuple(Member(str(task), life(task)) for task in (PS, W0, W1))
    view = View(JOB, 1, members)
    assert rig.join(W0) == [Send(task, view) for task in (PS, W0, W1)]
    assert rig.machine.phase is JobPhase.RUNNING


def test_a_join_that_is_repeated_is_answered_with_the_view_only_once_there_is_one() -> None:
    rig = CoordinatorRig()
    rig.join(PS)
    assert rig.join(PS) == []
    rig.join(W0)
    rig.join(W1)
    assert len(messages_to(rig.join(PS), PS, View)) == 1


def test_those_that_joined_are_told_who_is_missing_and_what_was_found_there() -> None:
    rig = CoordinatorRig()
    rig.join(PS)
    rig.join(W0)
    found = MissingTask(str(W1), "10.0.0.2:5000", "connection refused", 3.0, 2)
    rig.tell(Searched((found,)))
    assert rig.tell(Tick()) == [Send(PS, Roster((found,))), Send(W0, Roster((found,)))]
    assert rig.machine.next_deadline() == rig.now + REPEAT_SECONDS
    assert rig.tell(Tick()) == []
    assert [(wait.on, waited_for(wait), wait.state) for wait in rig.machine.waits()] == [
        (W1, "it to join", "connection refused")
    ]


def test_a_missing_task_that_was_not_looked_for_is_named_all_the_same() -> None:
    rig = CoordinatorRig()
    rig.now += 7.0
    missing = rig.machine.roster(rig.now).missing
    assert [(one.task, one.finding, one.seconds) for one in missing] == [
        (str(task), "not looked for yet", 7.0) for task in (PS, W0, W1)
    ]


def test_a_second_process_with_the_same_index_is_refused_and_both_are_named() -> None:
    rig = CoordinatorRig()
    rig.join(W1)
    (refused,) = messages_to(rig.hear(W1, join_of(W1, pid=99, incarnation=5)), W1, Refused)
    assert refused.reason.text == (
        "worker 1 is already running as process 1 on host1; give process 99 on host1 another --task_index"
    )
    assert rig.machine.phase is JobPhase.FORMING


def test_another_life_is_refused_while_the_job_runs() -> None:
    rig = running()
    (refused,) = messages_to(rig.hear(W1, join_of(W1, pid=99, incarnation=5)), W1, Refused)
    assert "the job is already running with another" in refused.reason.text
    assert rig.machine.end is None


def test_the_first_setting_that_differs_ends_the_job_and_is_named_with_both_tasks() -> None:
    rig = CoordinatorRig()
    rig.join(PS, optimizer="sgd", batch_size="32", dtype="float32")
    rig.join(W0, optimizer="sgd", batch_size="32", dtype="float32")
    effects = rig.join(W1, optimizer="adam", batch_size="64", dtype="float32")
    reason = "worker 1 has batch_size=64, server 0 has batch_size=32; start all tasks with the same value"
    end = End(False, str(W1), INITIAL_STEP, Reason(Cause.MISMATCH, reason, peer=str(PS)))
    assert effects == [Send(PS, end), Send(W0, end), Send(W1, end)]


def test_a_setting_that_only_one_side_has_is_a_difference() -> None:
    rig = CoordinatorRig()
    rig.join(PS, optimizer="sgd")
    rig.join(W0, optimizer="sgd", dtype="float16")
    assert rig.machine.end is not None
    assert "has dtype=float16" in rig.machine.end.reason.text
    assert "has dtype=(none)" in rig.machine.end.reason.text


@pytest.mark.parametrize("order", [(PS, W0, W1), (W0, PS, W1), (W0, W1, PS)])
def test_the_seed_is_compared_between_workers_and_a_server_may_be_started_without(order: tuple[TaskId, ...]) -> None:
    started = {PS: "1234", W0: "7", W1: "7"}
    agreeing = CoordinatorRig()
    for task in order:
        agreeing.join(task, seed=started[task])
    assert agreeing.machine.phase is JobPhase.RUNNING
    rig = CoordinatorRig()
    for task in order:
        rig.join(task, seed={**started, W1: "1234"}[task])
    assert rig.machine.end is not None
    reason = "worker 1 has seed=1234, worker 0 has seed=7; start all tasks with the same value"
    assert rig.machine.end.reason == Reason(Cause.MISMATCH, reason, peer=str(W0))


@pytest.mark.parametrize("first", [server(0), worker(0)])
def test_the_device_of_servers_is_compared_between_servers(first: TaskId) -> None:
    """Both homes of a shard must make the same bits."""
    rig = CoordinatorRig(servers=2, workers=1)
    others = [task for task in (server(0), worker(0), server(1)) if task != first]
    for task in (first, *others):
        device = {} if task.role is Role.WORKER else {SERVER_DEVICE: "gpu" if task.index else "cpu"}
        rig.join(task, optimizer="sgd", **device)
    assert rig.machine.end is not None
    reason = (
        "server 1 has device of servers=gpu, server 0 has device of servers=cpu; start all tasks with the same value"
    )
    assert rig.machine.end.reason == Reason(Cause.MISMATCH, reason, peer=str(server(0)))


def test_before_the_view_a_task_may_come_and_go() -> None:
    rig = CoordinatorRig()
    rig.join(W1)
    rig.tell(LinkLost(W1, "reset"))
    assert W1 in rig.machine.missing()
    rig.join_all()
    assert rig.machine.phase is JobPhase.RUNNING


def test_after_the_view_a_lost_link_alone_proves_nothing() -> None:
    rig = running()
    assert rig.tell(LinkLost(W1, "reset")) == []
    assert rig.machine.phase is JobPhase.RUNNING
    assert rig.machine.missing() == ()


# -- commits --


def test_a_step_is_committed_when_the_last_server_has_applied_it() -> None:
    rig = running(servers=2)
    assert rig.hear(server(1), Applied(INITIAL_STEP)) == []
    commit = Commit(INITIAL_STEP)
    assert rig.hear(PS, Applied(INITIAL_STEP)) == [Send(PS, commit), Send(server(1), commit)]
    assert rig.machine.committed == INITIAL_STEP


def test_a_server_that_repeats_itself_is_told_of_the_commit_again() -> None:
    rig = running(servers=2)
    rig.hear(PS, Applied(0))
    assert rig.hear(PS, Applied(0)) == []
    rig.hear(server(1), Applied(0))
    assert rig.hear(server(1), Applied(0)) == [Send(server(1), Commit(0))]


def test_only_servers_of_this_job_count_for_a_commit() -> None:
    rig = running(servers=1)
    assert rig.hear(W0, Applied(0)) == []
    assert rig.hear(PS, Applied(0), incarnation=life(PS) + 1) == []
    assert rig.machine.committed == INITIAL_STEP - 1


# -- backup workers --


def test_the_first_workers_that_seal_a_step_make_it_and_the_others_are_counted() -> None:
    rig = CoordinatorRig(servers=2, workers=3, aggregate=2)
    rig.join_all()
    assert rig.hear(worker(2), Seal(0, (), ())) == rig.hear(worker(2), Seal(0, (), ())) == []
    decision = Contributors(0, (0, 2))
    assert rig.hear(W0, Seal(0, (), ())) == [Send(PS, decision), Send(server(1), decision)]
    assert rig.hear(W1, Seal(0, (), ())) == []
    assert rig.machine.dropped == {W1: 1}


def test_a_server_that_asks_again_is_told_the_decision_again() -> None:
    rig = CoordinatorRig(servers=1, workers=2, aggregate=1)
    rig.join_all()
    rig.hear(PS, Applied(INITIAL_STEP))
    rig.hear(W1, Seal(0, (), ()))
    assert rig.hear(PS, Applied(INITIAL_STEP)) == [Send(PS, Commit(INITIAL_STEP)), Send(PS, Contributors(0, (1,)))]


# -- the end --


def test_the_job_ends_well_when_every_worker_has_finished() -> None:
    rig = running()
    assert rig.hear(W0, Done(20)) == []
    assert rig.hear(W0, Done(20)) == []
    end = End(True, "", 20, NO_REASON)
    assert rig.hear(W1, Done(20)) == [Send(task, end) for task in (PS, W0, W1)]
    assert rig.machine.phase is JobPhase.ENDED


@pytest.mark.parametrize("message", [Done(20), Applied(19), Failed("", 3, because("late"))])
def test_whoever_still_speaks_after_the_end_is_told_of_it(message: Message) -> None:
    rig = running()
    rig.hear(W0, Done(20))
    rig.hear(W1, Done(20))
    assert messages_to(rig.hear(PS, message), PS, End) == [End(True, "", 20, NO_REASON)]


def test_a_member_whose_link_comes_back_after_the_end_is_told_of_it() -> None:
    """A server has nothing to ask at the end: if the word was lost with its link it would wait for ever."""
    rig = running(servers=2)
    rig.hear(W0, Done(20))
    assert rig.tell(LinkUp(server(1), life(server(1)))) == []
    rig.hear(W1, Done(20))
    assert messages_to(rig.tell(LinkUp(server(1), life(server(1)))), server(1), End) == [End(True, "", 20, NO_REASON)]
    assert rig.tell(LinkUp(server(1), 5)) == []


def test_a_task_that_joins_after_the_end_is_told_of_it() -> None:
    rig = CoordinatorRig()
    rig.join(PS)
    rig.tell(PeerGone(W0, because("exited with code 1")))
    assert [end.culprit for end in messages_to(rig.join(W1), W1, End)] == [str(W0)]


def test_the_first_real_error_wins() -> None:
    rig = running()
    effects = rig.hear(W1, Failed("", 7, because("out of memory")))
    end = End(False, str(W1), 7, because("out of memory"))
    assert effects == [Send(task, end) for task in (PS, W0, W1)]
    assert rig.tell(PeerGone(W1, because("exited with code 1"))) == []
    assert rig.tell(Broken(PS, 7, because("lost a worker"))) == []
    assert messages_to(rig.hear(W0, Failed(str(W1), 7, because("lost worker 1"))), W0, End) == [end]
    assert rig.machine.end == end


def test_a_failure_may_name_another_task_as_the_culprit() -> None:
    rig = running()
    rig.hear(W0, Failed(str(W1), 3, because("its model differs")))
    assert rig.machine.end == End(False, str(W1), 3, because("its model differs"))


def test_proof_that_a_task_has_died_ends_the_job_with_the_open_step() -> None:
    rig = running()
    rig.hear(PS, Applied(4))
    rig.tell(PeerGone(W1, because("was killed by signal 9")))
    assert rig.machine.end == End(False, str(W1), 5, because("was killed by signal 9"))


def test_strangers_cannot_end_the_job() -> None:
    rig = running()
    assert rig.hear(W1, Failed("", 0, because("I am broken")), incarnation=5) == []
    assert rig.hear(worker(9), Done(20), incarnation=5) == []
    assert rig.machine.end is None


def test_every_row_of_the_table_is_walked_above_and_nothing_leaves_the_end() -> None:
    assert {state for state, _ in JOB_PHASE_TRANSITIONS} == {JobPhase.FORMING, JobPhase.RUNNING}
    forming = CoordinatorRig()
    forming.join(PS)
    forming.tell(Broken(PS, INITIAL_STEP, because("no disk")))
    assert forming.machine.phase is JobPhase.ENDED


def test_the_snapshot_says_who_joined_who_is_missing_and_how_it_ended() -> None:
    rig = CoordinatorRig()
    rig.join(PS)
    snapshot = rig.machine.snapshot()
    assert snapshot["joined"] == [str(PS)]
    assert snapshot["missing"] == [str(W0), str(W1)]
    rig.tell(PeerGone(PS, because("gone")))
    assert rig.machine.snapshot()["end"] == {"ok": False, "culprit": str(PS), "reason": "gone"}
