"""One connection of a link, seen from its own task."""

from __future__ import annotations

from dataclasses import replace

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.events import Event, Received, TensorKind, TransferEnded
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.messages import (
    Envelope,
    GradientNote,
    Holding,
    Message,
    Rates,
    Resolution,
    StateBefore,
    Ticket,
)
from lockstep.runtime.task.connection import Connection
from lockstep.transports.base import LinkDownError, Move
from lockstep.transports.control.codec import encode


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

    def envelope(self, message: Message) -> Envelope:
        return Envelope(1, str(self.task), 5, message)

    def tensors_in(self, bucket: int) -> int:
        del bucket
        return 1


class Link:
    """Stands in for an endpoint that takes transfers until it is down."""

    lends_in_place = False

    def __init__(self) -> None:
        self.down = False
        self.said: list[bytes] = []

    def say(self, word: bytes) -> bool:
        self.said.append(word)
        return not self.down

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


class Stream:
    """Stands in for a control link."""

    def __init__(self) -> None:
        self.sent: list[Envelope] = []

    def send(self, envelope: Envelope) -> bool:
        self.sent.append(envelope)
        return True


def test_what_is_confirmed_in_every_step_goes_beside_the_tensors_where_the_endpoint_can_speak() -> None:
    connection, task, link = connected()
    connection.link = stream = Stream()  # type: ignore[assignment]
    connection.send(Holding(0, 4))
    assert (link.said, stream.sent) == ([encode(task.envelope(Holding(0, 4)))], [])
    connection.send(Rates(3, ()))
    assert (len(link.said), [one.message for one in stream.sent]) == (1, [Rates(3, ())])
    link.down = True
    connection.send(Holding(0, 5))
    assert [one.message for one in stream.sent] == [Rates(3, ()), Holding(0, 5)]


def test_a_short_resolution_goes_beside_the_tensors_where_it_may_overtake_what_was_said_before() -> None:
    connection, task, link = connected()
    connection.link = stream = Stream()  # type: ignore[assignment]
    short = Resolution(1, 7, 2, (), (), (), 3, (StateBefore("/job:worker/replica:0/task:0", b"few"),), "", ())
    long = replace(short, states=(StateBefore("/job:worker/replica:0/task:0", bytes(1 << 20)),))
    connection.send(short)
    connection.send(long, overtakes=True)
    connection.send(Rates(3, ()), overtakes=True)
    assert (link.said, [one.message for one in stream.sent]) == ([], [short, long, Rates(3, ())])
    connection.send(short, overtakes=True)
    assert (len(link.said), len(stream.sent)) == (1, 3)
    connection.incarnation = 5
    connection.on_word(link.said[0])
    assert task.done == [Received(server(1), 5, short)]


def test_a_word_is_carried_out_by_the_thread_that_brings_it_if_it_is_from_the_right_life() -> None:
    connection, task, _ = connected()
    word = encode(task.envelope(Holding(0, 4)))
    connection.on_word(word)
    connection.incarnation = 5
    connection.on_word(word)
    assert task.done == [Received(server(1), 5, Holding(0, 4))]


def test_a_word_that_is_none_ends_the_connection() -> None:
    for word, why in (
        (b"\xff", "Envelope"),
        (encode(Task().envelope(Rates(3, ()))), "a Rates belongs on the control stream"),
    ):
        ended: list[Reason] = []
        connection = Connection(Task(), server(1), lambda _connection, reason, ended=ended: ended.append(reason))  # type: ignore[arg-type, misc]
        connection.on_up()
        connection.on_word(word)
        assert len(ended) == 1
        assert why in ended[0].text
