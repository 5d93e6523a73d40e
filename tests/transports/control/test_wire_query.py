"""What is found at an address: a monitor, nothing, another program, or something that does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.monitor_query import query_monitor, query_monitor_quickly
from lockstep.transports.control.monitor_service import add_monitor_service
from lockstep.transports.control.server import ControlServer
from lockstep.transports.control.tcp_probe import probe, probe_program

DESCRIPTION = Description("/t", "host", 1, 2, 3, "starting", 0.5, "", False, 0, "0.1", 0)
SNAPSHOT = b'{"kind": "monitor"}'


@contextmanager
def monitor(may_answer: threading.Event | None = None) -> Iterator[str]:
    """The address of a monitor, which does not answer before the event."""

    def describe() -> Description:
        if may_answer is not None:
            may_answer.wait(10.0)
        return DESCRIPTION

    server = ControlServer("127.0.0.1", 0, threads=8)
    changed = Broadcast()
    add_monitor_service(server, describe, changed, lambda: SNAPSHOT, max_watchers=1)
    server.start()
    try:
        yield server.address
    finally:
        if may_answer is not None:
            may_answer.set()
        changed.close()
        server.stop(0)


@contextmanager
def program(banner: bytes) -> Iterator[str]:
    """The address of a program that sends ``banner`` to each connection, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            held = []
            while True:
                try:
                    held.append(listening.accept()[0])
                except OSError:
                    break
                if banner:
                    held[-1].sendall(banner)
            for connection in held:
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)


def test_a_monitor_is_found_with_its_description_and_quickly_with_its_snapshot() -> None:
    with monitor() as address:
        assert query_monitor(address).description == DESCRIPTION
        quick = query_monitor_quickly(address, 5.0)
        assert (quick.found.reach, quick.description, quick.snapshot) == (Reach.LOCKSTEP, DESCRIPTION, SNAPSHOT)


def test_a_monitor_that_does_not_answer_in_time_is_mute_and_not_another_program() -> None:
    with monitor(threading.Event()) as address:
        for answer in (query_monitor(address, 0.2), query_monitor_quickly(address, 0.2)):
            assert (answer.found.reach, answer.description) == (Reach.MUTE, None)
            assert answer.found.phrase == "accepts connections but did not answer within 0.2 s"


def test_a_grpc_server_without_a_monitor_accepts_and_says_why_it_is_none() -> None:
    server = ControlServer("127.0.0.1", 0, threads=2)
    server.start()
    try:
        found = query_monitor(server.address).found
        assert found.reach is Reach.MUTE
        assert "does not speak this protocol" in found.phrase
        assert query_monitor_quickly(server.address, 5.0).found.reach is Reach.BROKEN
    finally:
        server.stop(0)


def test_another_program_shows_its_first_line_and_its_process() -> None:
    with program(b"SSH-2.0-test\r\n") as address:
        found = query_monitor(address).found
    assert found.reach is Reach.OTHER_PROGRAM
    assert found.phrase.startswith("is another program, not Lockstep (it sends 'SSH-2.0-test'), process ")


def test_a_program_that_sends_nothing_is_mute() -> None:
    with program(b"") as address:
        assert probe_program(address, 0.1).reach is Reach.MUTE
        assert query_monitor_quickly(address, 0.2).found.reach is not Reach.LOCKSTEP


def test_where_nothing_listens_both_queries_are_refused() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        silence = query_monitor_quickly(address, 5.0).found.silence(address)
        assert query_monitor(address).found.reach is silence.reach is Reach.REFUSED
        assert silence.text == f"{address} refuses connections; nothing listens there"


@pytest.mark.parametrize(
    ("address", "reach"), [("no-such-host.invalid:1", Reach.UNRESOLVED), ("no-port", Reach.BROKEN)]
)
def test_an_address_that_leads_nowhere_says_why(address: str, reach: Reach) -> None:
    assert probe(address).reach is reach


def test_a_listener_that_closes_while_it_is_called_is_no_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object, **__: object) -> socket.socket:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(socket, "create_connection", reset)
    found = probe("127.0.0.1:9")
    assert found.reach is Reach.REFUSED
    assert not found.no_packet_returns
