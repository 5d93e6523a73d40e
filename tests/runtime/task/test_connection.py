"""One connection of a link, seen from its own task."""

from __future__ import annotations

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.events import Event, TensorKind, TransferEnded
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.messages import GradientNote, Ticket
from lockstep.runtime.task.connection import Connection
from lockstep.transports.base import LinkDownError, Move


class Task:
    """Stands in for a node: records what it receives, and how."""

    task = worker(0)
    faults = None

    def __init__(self) -> None:
        self.posted: list[Event] = []
        self.done: list[Event] = []

    def post(self, event: Event) -> None:
        self.posted.append(event)

    def do(self, event: Event) -> None:
        self.done.append(event)

    def tensors_in(self, bucket: int) -> int:
        del bucket
        return 1


class Link:
    """Stands in for an endpoint that takes transfers until it is down."""

    lends_in_place = False

    def __init__(self) -> None:
        self.down = False

    def start(self, move: Move) -> int:
        del move
        if self.down:
            raise LinkDownError("the link is lost")
        return 7


def connected() -> tuple[Connection, Task, Link]:
    task, link = Task(), Link()
    connection = Connection(task, server(1), lambda _connection, _reason: None)  # type: ignore[arg-type]
    connection.endpoint = link  # type: ignore[assignment]
    connection.on_up()
    task.posted.clear()
    return connection, task, link


def lend(connection: Connection) -> None:
    connection.lend_gradient(GradientNote(3, 0, 0), None, 0, 64, Ticket("grpc", 0, 64, 0, b""), 0)  # type: ignore[arg-type]


def test_a_finished_transfer_is_reported_by_the_thread_that_finished_it_and_a_failed_one_is_not() -> None:
    connection, task, _ = connected()
    lend(connection)
    connection.on_sent(7)
    assert task.done == [TransferEnded(server(1), 3, 0, TensorKind.GRADIENT, True)]
    lend(connection)
    connection.on_failed(7, "the link is lost")
    assert task.posted == [TransferEnded(server(1), 3, 0, TensorKind.GRADIENT, False)]


def test_a_transfer_that_meets_a_link_at_its_end_raises_nothing() -> None:
    """What failed is retried at once, perhaps before the endpoint has reported its end, which follows."""
    connection, task, link = connected()
    link.down = True
    lend(connection)
    assert task.posted == task.done == []


class Lent:
    """Stands in for a loan."""

    buffer = memoryview(b"")
    released = False

    def release(self) -> None:
        self.released = True


def test_a_note_that_is_none_ends_the_connection_and_not_the_thread_that_reads() -> None:
    ended: list[Reason] = []
    connection = Connection(Task(), server(1), lambda _connection, reason: ended.append(reason))  # type: ignore[arg-type]
    connection.on_up()
    connection.on_arrived(b"no note", 64)
    loan = Lent()
    connection.on_lent(b"no note", loan)
    assert [reason.text for reason in ended] == ["a note has 17 bytes, this one has 7"]
    assert loan.released
