"""Who may say what: decisions of the coordinator and numbers of the chief count from them alone."""

from __future__ import annotations

import typing

import pytest

from helpers.reasons import because
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.events import LinkUp, Received
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import (
    Commit,
    Contributors,
    End,
    Grant,
    GroupRates,
    Left,
    Message,
    Open,
    Printed,
    Rates,
    Refused,
    Report,
    Roster,
    Seal,
    View,
)
from lockstep.protocol.core.speakers import SPEAKERS, Speaker, may_say
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine
from protocol.protocol_rigs import JOB, TICKET, join_of, life

SHAPE = ClusterShape(2, 2)
PS0, PS1, W0, W1 = server(0), server(1), worker(0), worker(1)

DECISIONS: list[Message] = [
    Commit(3),
    Contributors(3, (0,)),
    View(JOB, 1, ()),
    End(False, str(W0), 3, because("forged")),
    Left(str(W0), 15),
    Refused(because("forged")),
    Roster(()),
    Report(ReportKind.VERDICT, "forged", b"{}"),
    Printed(ReportKind.VERDICT, str(W0)),
]


def make(task: TaskId) -> TaskMachine:
    journal = Journal()
    is_server = task in SHAPE.server_ids()
    make_role = ServerMachine if is_server else WorkerMachine
    role: ServerMachine | WorkerMachine = make_role(task, SHAPE, journal, eager=True)
    member = MemberMachine(task, PS0, join_of(task), 300.0, journal, 0.0)
    machine = TaskMachine(life(task), member, (role,), None, journal)
    for peer in SHAPE.tasks():
        machine.handle(LinkUp(peer, life(peer)), 1.0)
    return machine


def test_every_message_has_its_speaker() -> None:
    assert set(SPEAKERS) == set(typing.get_args(Message))


@pytest.mark.parametrize("message", DECISIONS, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("receiver", [PS1, W0])
def test_a_decision_from_anyone_but_the_coordinator_is_dropped_and_journalled(
    receiver: TaskId, message: Message
) -> None:
    assert SPEAKERS[type(message)] is Speaker.COORDINATOR
    for forger in (PS1, W1, W0):
        task = make(receiver)
        before = task.snapshot()
        assert task.handle(Received(forger, life(forger), message), 2.0) == []
        assert task.snapshot() == before
        (dropped,) = [record for record in task.journal if record.happening is Happening.DROPPED]
        assert (dropped.peer, type(message).__name__ in dropped.cause) == (forger, True)


def test_the_coordinator_itself_is_heard() -> None:
    task = make(W0)
    end = Received(PS0, life(PS0), End(False, str(W1), 3, because("it was killed")))
    assert task.handle(end, 2.0) != []
    assert all(record.happening is not Happening.DROPPED for record in task.journal)


def test_rates_from_another_worker_than_the_chief_change_nothing() -> None:
    rates = Rates(0, (GroupRates(("lr",), (1e9,)),))
    task = make(PS1)
    before = task.snapshot()
    assert task.handle(Received(W1, life(W1), rates), 2.0) == []
    assert task.handle(Received(PS0, life(PS0), rates), 2.0) == []
    assert task.snapshot() == before
    assert not may_say(PS0, rates, PS0), "a server has no rates to send"


def test_servers_do_not_seal_and_workers_do_not_open() -> None:
    seal = Seal(0, (), ())
    assert not may_say(PS1, seal, PS0)
    for message in (Open(0, ()), Grant(TICKET)):
        assert not may_say(W1, message, PS0)
