"""The control link: order, refusal, the reasons of its end, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from helpers.reasons import because
from helpers.wire import PATIENCE, Acceptor, RecordingOwner, accepting, hello, wait_until
from lockstep.protocol.core.messages import Commit, Envelope, Heartbeat, Hello, LocalState, Refused, TransportAddress
from lockstep.security.refusals import REFUSALS_THREAD
from lockstep.transports.base import LinkState
from lockstep.transports.control import link as link_module
from lockstep.transports.control import outbox
from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.codec import WireError, encode, join_envelopes
from lockstep.transports.control.link import ControlLink, dial_link
from lockstep.transports.control.server import ControlServer, method_path


def numbered(number: int) -> Envelope:
    return Envelope(1, "/dialer", 1, Commit(number))


def state_of(link: ControlLink) -> LinkState:
    """Hide from the type checker that the state was compared before: it changes."""
    return link.state


def open_link(acceptor: Acceptor) -> tuple[ControlLink, RecordingOwner, RecordingOwner]:
    owner = RecordingOwner()
    link = dial_link(acceptor.server.address, hello("/dialer"), owner, PATIENCE)
    owner.wait_open()
    wait_until("the acceptor has its owner", lambda: bool(acceptor.owners and acceptor.owners[-1].opened))
    return link, owner, acceptor.owners[-1]


@contextmanager
def peer_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    script = Path(__file__).parent / "link_peer.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(
        "all threads of the test have ended",
        lambda: {one.name for one in threading.enumerate() if one not in before} <= {REFUSALS_THREAD},
    )


def test_both_sides_learn_who_the_other_is() -> None:
    with accepting() as acceptor:
        link, owner, accepted = open_link(acceptor)
        assert owner.opened == [hello("/acceptor", 2)]
        assert accepted.opened == [hello("/dialer", 1)]
        assert link.peer == hello("/acceptor", 2)
        assert state_of(link) is LinkState.UP
        link.close()
        assert state_of(link) is LinkState.CLOSED


def test_envelopes_arrive_in_order_in_both_directions() -> None:
    with accepting() as acceptor:
        link, owner, accepted = open_link(acceptor)
        assert accepted.link is not None
        for number in range(3000):
            assert link.send(numbered(number))
            assert accepted.link.send(numbered(3000 + number))
        accepted.wait_messages(3000)
        owner.wait_messages(3000)
        assert [m.message for m in accepted.messages] == [Commit(n) for n in range(3000)]
        assert [m.message for m in owner.messages] == [Commit(3000 + n) for n in range(3000)]
        link.close()


def test_an_envelope_of_the_largest_size_passes() -> None:
    with accepting() as acceptor:
        link, _, accepted = open_link(acceptor)
        largest = Envelope(1, "/dialer", 1, LocalState(0, b"x" * ((16 << 20) - 100)))
        for number in range(100):
            link.send(numbered(number))
        link.send(largest)
        accepted.wait_messages(101)
        assert accepted.messages[-1] == largest
        link.close()


def test_what_was_sent_before_close_still_arrives_and_the_peer_hears_of_the_close() -> None:
    with accepting() as acceptor:
        link, owner, accepted = open_link(acceptor)
        for number in range(500):
            link.send(numbered(number))
        link.close()
        assert accepted.wait_lost() == "closed by the peer"
        assert len(accepted.messages) == 500
        assert owner.lost == []


def test_what_the_acceptor_sent_before_its_close_still_arrives() -> None:
    with accepting() as acceptor:
        link, owner, accepted = open_link(acceptor)
        assert accepted.link is not None
        for number in range(500):
            accepted.link.send(numbered(number))
        accepted.link.close()
        assert owner.wait_lost() == "closed by the peer"
        assert len(owner.messages) == 500
        assert accepted.lost == []
        assert state_of(link) is LinkState.LOST
        assert not link.send(numbered(0))


def test_close_may_be_called_twice_and_from_a_callback() -> None:
    class ClosingOwner(RecordingOwner):
        def on_message(self, envelope: Envelope) -> None:
            assert self.link is not None
            self.link.close()
            super().on_message(envelope)

    with accepting() as acceptor:
        owner = ClosingOwner()
        owner.link = dial_link(acceptor.server.address, hello("/dialer"), owner, PATIENCE)
        owner.wait_open()
        wait_until("the acceptor has its owner", lambda: bool(acceptor.owners))
        accepted = acceptor.owners[0]
        assert accepted.link is not None
        accepted.link.send(numbered(1))
        accepted.link.send(numbered(2))
        assert accepted.wait_lost() == "closed by the peer"
        owner.link.close()
        assert len(owner.messages) == 1
        assert owner.lost == []


def test_a_refusal_reaches_the_dialer_with_its_reason() -> None:
    with accepting(lambda peer: Refused(because(f"{peer.task} is not of this job"))) as acceptor:
        owner = RecordingOwner()
        link = dial_link(acceptor.server.address, hello("/stranger"), owner, PATIENCE)
        assert owner.wait_lost() == "/stranger is not of this job"
        assert owner.opened == []
        assert state_of(link) is LinkState.LOST
        assert acceptor.owners == []


def test_where_nothing_listens_the_dialer_hears_so_at_once() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        owner = RecordingOwner()
        dial_link(address, hello("/dialer"), owner, PATIENCE)
        assert owner.wait_lost() == f"{address} refuses connections; nothing listens there"


def test_a_name_that_does_not_resolve_is_said_to() -> None:
    owner = RecordingOwner()
    dial_link("no-such-host.invalid:2222", hello("/dialer"), owner, PATIENCE)
    assert owner.wait_lost().startswith("no-such-host.invalid:2222 cannot be looked up")


def test_a_listener_that_says_nothing_costs_no_more_than_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        owner = RecordingOwner()
        dial_link(address, hello("/dialer"), owner, 0.3)
        assert owner.wait_lost() == f"no answer within 0.3 s: {address} accepts connections but sends nothing"


def test_close_while_connecting_returns_promptly_without_a_callback() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        owner = RecordingOwner()
        link = dial_link(f"127.0.0.1:{silent.getsockname()[1]}", hello("/dialer"), owner, PATIENCE)
        link.close()
        assert state_of(link) is LinkState.CLOSED
        assert owner.lost == []


def test_something_else_than_our_service_is_recognised() -> None:
    server = ControlServer("127.0.0.1", 0, threads=2)
    server.start()
    try:
        owner = RecordingOwner()
        dial_link(server.address, hello("/dialer"), owner, PATIENCE)
        assert "does not speak this protocol" in owner.wait_lost()
    finally:
        server.stop(0)


def test_a_server_that_stops_ends_its_links() -> None:
    with accepting() as acceptor:
        _, owner, accepted = open_link(acceptor)
        acceptor.server.stop(0)
        assert "ended without a goodbye" in owner.wait_lost()
        assert "ended without a goodbye" in accepted.wait_lost()


def test_a_killed_acceptor_is_noticed_at_once() -> None:
    with peer_process() as (process, address):
        owner = RecordingOwner()
        link = dial_link(address, hello("/dialer"), owner, PATIENCE)
        owner.wait_open()
        process.kill()
        owner.wait_for("the link is lost", lambda: bool(owner.lost), 2.0)
        assert "without a goodbye" in owner.lost[0] or "reset" in owner.lost[0]
        assert state_of(link) is LinkState.LOST
        link.close()


def test_a_killed_dialer_is_noticed_at_once_and_not_taken_for_a_close() -> None:
    dialer = (
        "import sys, threading; sys.path.insert(0, sys.argv[2])\n"
        "from helpers.wire import RecordingOwner, hello\n"
        "from lockstep.transports.control.link import dial_link\n"
        "owner = RecordingOwner(); link = dial_link(sys.argv[1], hello('/doomed'), owner, 10)\n"
        "threading.Event().wait(60)\n"
    )
    with accepting() as acceptor:
        arguments = [sys.executable, "-c", dialer, acceptor.server.address, str(Path(__file__).parents[2])]
        with subprocess.Popen(arguments) as process:
            wait_until("the dialer has come", lambda: bool(acceptor.owners and acceptor.owners[0].opened), 20)
            process.kill()
            accepted = acceptor.owners[0]
            accepted.wait_for("the link is lost", lambda: bool(accepted.lost), 2.0)
            assert accepted.lost == ["the connection ended without a goodbye"]


def test_a_frozen_peer_keeps_its_link_and_close_still_returns() -> None:
    with peer_process() as (process, address):
        owner = RecordingOwner()
        link = dial_link(address, hello("/dialer"), owner, PATIENCE)
        owner.wait_open()
        process.send_signal(signal.SIGSTOP)
        for number in range(100):
            assert link.send(numbered(number))
        assert state_of(link) is LinkState.UP
        process.send_signal(signal.SIGCONT)
        owner.wait_messages(100)
        process.send_signal(signal.SIGSTOP)
        link.send(numbered(100))
        link.close(flush_seconds=0.2)
        assert state_of(link) is LinkState.CLOSED
        assert owner.lost == []


def test_a_peer_that_does_not_read_ends_the_link_instead_of_filling_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 4 << 20)
    with peer_process() as (process, address):
        owner = RecordingOwner()
        link = dial_link(address, hello("/dialer"), owner, PATIENCE)
        owner.wait_open()
        process.send_signal(signal.SIGSTOP)
        large = Envelope(1, "/dialer", 1, Refused(because("x" * (1 << 20))))
        sent = 0
        while link.send(large) and sent < 1000:
            sent += 1
        assert sent < 1000
        assert owner.wait_lost().startswith("the peer does not read:")
        link.close()


def raw_link(address: str, *messages: bytes) -> grpc.RpcError | list[bytes]:
    """Call ``Task.Link`` without our own client."""
    with open_channel(address) as channel:
        call = channel.stream_stream(method_path("Task", "Link"))(iter(messages))
        try:
            return list(call)
        except grpc.RpcError as error:
            return error


def test_a_stranger_that_sends_rubbish_is_dropped_and_the_server_goes_on() -> None:
    with accepting() as acceptor:
        raw_link(acceptor.server.address, b"\xff\xff\xff")
        raw_link(acceptor.server.address, join_envelopes([encode(Envelope(0, "", 0, Heartbeat(0.0)))]))
        assert acceptor.owners == []
        link, _, _ = open_link(acceptor)
        link.close()


def test_a_stranger_without_a_hello_does_not_hold_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HELLO_SECONDS", 0.2)
    with accepting() as acceptor, open_channel(acceptor.server.address) as channel:
        never = threading.Event()

        def say_nothing() -> Iterator[bytes]:
            never.wait(PATIENCE)
            yield from ()

        call = channel.stream_stream(method_path("Task", "Link"))(say_nothing())
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        assert "no Hello within 0.2 s" in refused.value.details()
        never.set()


def test_rubbish_in_the_middle_ends_the_link_with_a_reason() -> None:
    with accepting() as acceptor:
        introduction = join_envelopes([encode(Envelope(0, "/raw", 1, hello("/raw")))])
        raw_link(acceptor.server.address, introduction, b"\xff\xff\xff")
        assert "are not a valid Envelopes" in acceptor.owners[0].wait_lost()


def test_an_error_in_a_callback_ends_the_link_for_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_value))

    class FailingOwner(RecordingOwner):
        def on_open(self, peer: Hello) -> None:
            raise LookupError("a bug")

    with accepting() as acceptor:
        owner = FailingOwner()
        dial_link(acceptor.server.address, hello("/dialer"), owner, PATIENCE)
        assert owner.wait_lost() == "a callback of the link's owner raised an error"
        wait_until("the error is shown", lambda: bool(raised))
        assert isinstance(raised[0], LookupError)
        assert "without a goodbye" in acceptor.owners[0].wait_lost()


def test_a_message_that_cannot_be_encoded_is_the_senders_error_and_the_link_goes_on() -> None:
    with accepting() as acceptor:
        link, _, accepted = open_link(acceptor)
        with pytest.raises(WireError):
            link.send(numbered(2**80))
        link.send(numbered(1))
        accepted.wait_messages(1)
        link.close()


def test_silent_streams_do_not_use_up_the_threads_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: 17 of them, and the cluster never formed."""
    monkeypatch.setattr("lockstep.transports.control.link.HELLO_SECONDS", 60.0)  # whoever is cut made room
    with accepting() as acceptor:
        threads = acceptor.server.threads
        with contextlib.ExitStack() as held:
            silent = []
            for _ in range(2 * threads):
                channel = held.enter_context(open_channel(acceptor.server.address))
                never = threading.Event()
                held.callback(never.set)
                silent.append(channel.stream_stream(method_path("Task", "Link"))(_says_nothing(never)))
            wait_until("those beyond a third were cut", lambda: sum(c.is_active() for c in silent) <= threads // 3)
            link, _, _ = open_link(acceptor)
            link.close()


def _says_nothing(until: threading.Event) -> Iterator[bytes]:
    until.wait(6 * PATIENCE)
    yield from ()


def test_a_first_message_larger_than_any_hello_is_not_decoded() -> None:
    with accepting() as acceptor:
        owner = RecordingOwner()
        large = dataclasses.replace(hello("/dialer"), transports=(TransportAddress("grpc", bytes(100_000)),))
        dial_link(acceptor.server.address, large, owner, PATIENCE)
        assert owner.wait_lost()
        assert acceptor.owners == []
