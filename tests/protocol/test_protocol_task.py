"""All machines of one task behind one door."""

from __future__ import annotations

from helpers.reasons import because
from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.core.effects import BecameMember, JobEnded, Send, SendPull
from lockstep.protocol.core.events import Broken, LinkUp, PeerGone, Received, Tick
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import End, Pull, View
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine
from protocol.protocol_rigs import JOB, TICKET, join_of, life, only

SHAPE = ClusterShape(1, 1)
PS, W0 = server(0), worker(0)


def make(task: TaskId) -> TaskMachine:
    journal = Journal()
    coordinator = CoordinatorMachine(SHAPE, JOB, journal, 0.0) if task == PS else None
    make_role = ServerMachine if task == PS else WorkerMachine
    role: ServerMachine | WorkerMachine = make_role(task, SHAPE, journal, eager=True)
    member = MemberMachine(task, PS, join_of(task), 300.0, journal, 0.0)
    return TaskMachine(life(task), member, (role,), coordinator, journal)


def test_the_coordinators_own_task_joins_without_a_network() -> None:
    task = make(PS)
    assert task.start(0.0) == []
    assert task.coordinator is not None
    assert task.coordinator.missing() == (W0,)


def test_a_task_without_the_coordinator_waits_for_its_link() -> None:
    task = make(W0)
    assert task.start(0.0) == []
    assert task.handle(LinkUp(PS, life(PS)), 1.0) == [Send(PS, join_of(W0))]


def test_messages_to_oneself_never_leave() -> None:
    task = make(PS)
    task.start(0.0)
    effects = task.handle(Received(W0, life(W0), join_of(W0)), 1.0)
    assert only(effects, BecameMember) == [BecameMember(JOB, only(effects, BecameMember)[0].members)]
    assert [(effect.peer, type(effect.message)) for effect in only(effects, Send)] == [(W0, View)]
    task.check()


def test_a_defect_of_the_coordinators_own_task_ends_the_job_for_everybody() -> None:
    task = make(PS)
    task.start(0.0)
    task.handle(Received(W0, life(W0), join_of(W0)), 1.0)
    effects = task.handle(Broken(PS, 3, because("no disk")), 2.0)
    assert effects == [
        Send(W0, End(False, str(PS), 3, because("no disk"))),
        JobEnded(False, str(PS), 3, because("no disk")),
    ]


def test_the_coordinators_task_that_gives_up_tells_those_that_wait_with_it() -> None:
    """They would otherwise see only that the coordinator is gone, and name the wrong task."""
    shape = ClusterShape(1, 2)
    journal = Journal()
    task = TaskMachine(
        life(PS),
        MemberMachine(PS, PS, join_of(PS), 300.0, journal, 0.0),
        (ServerMachine(PS, shape, journal, eager=True),),
        CoordinatorMachine(shape, JOB, journal, 0.0),
        journal,
    )
    task.start(0.0)
    task.handle(Received(W0, life(W0), join_of(W0)), 1.0)
    task.handle(Tick(), 2.0)
    effects = task.handle(Tick(), 300.0)
    (end,) = [effect.message for effect in only(effects, Send) if isinstance(effect.message, End)]
    assert end.culprit == str(worker(1))
    assert end.reason.text.startswith("the cluster was not complete after 300 s; missing: worker 1")
    assert only(effects, JobEnded) == [JobEnded(False, str(worker(1)), -1, end.reason)]


def test_the_death_of_a_worker_ends_the_job_on_the_coordinators_task_too() -> None:
    task = make(PS)
    task.start(0.0)
    task.handle(Received(W0, life(W0), join_of(W0)), 1.0)
    effects = task.handle(PeerGone(W0, because("was killed by signal 9")), 2.0)
    assert [(e.culprit, e.reason.text) for e in only(effects, JobEnded)] == [(str(W0), "was killed by signal 9")]


def test_deadline_waits_and_snapshot_are_those_of_all_machines() -> None:
    task = make(PS)
    task.start(0.0)
    assert task.next_deadline() == 0.0
    assert {wait.on for wait in task.waits()} == {PS, W0}
    assert set(task.snapshot()) == {"coordinator", "member", "role"}
    assert set(make(W0).snapshot()) == {"member", "role"}


def test_a_request_before_the_model_is_known_is_kept() -> None:
    task = make(PS)
    task.start(0.0)
    task.handle(LinkUp(W0, life(W0)), 1.0)
    effects = task.handle(Received(W0, life(W0), Pull(0, (), TICKET)), 1.0)
    assert only(effects, SendPull) == []
    task.check()
