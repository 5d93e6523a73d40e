"""A listener names whom it refuses, and leaves nothing behind when it is closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from helpers.waiting import wait_until
from lockstep.security.listening import ProvenListener
from lockstep.security.proof import Parties, ProofError, Refusal
from lockstep.security.wire import ProvenSocket, dial

PARTIES = Parties(purpose="test", dialer="/a", acceptor="/b", version="1")
KEY, OTHER = b"k" * 32, b"o" * 32


class Listening:
    def __init__(self) -> None:
        self.used: list[ProvenSocket] = []
        self.refused: list[tuple[str, Refusal]] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.where = listener.getsockname()

        def use(proven: ProvenSocket) -> None:
            self.used.append(proven)
            proven.receive(100, time.monotonic() + 60)

        def refuse(address: str, error: ProofError) -> None:
            self.refused.append((address, error.refusal))

        self.door = ProvenListener(listener, KEY, lambda _: PARTIES, use, "test", refuse)


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.door.close()


def test_whoever_is_refused_is_named_with_address_and_reason(listening: Listening) -> None:
    with socket.create_connection(listening.where) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: listening.refused, 10.0, "the refusal")
    assert listening.refused == [("127.0.0.1", Refusal.MALFORMED)]
    assert listening.used == []


def test_closing_cuts_silent_strangers_and_connections_in_use(listening: Listening) -> None:
    with socket.create_connection(listening.where), socket.create_connection(listening.where) as member:
        dial(member, KEY, PARTIES, time.monotonic() + 10)
        wait_until(lambda: listening.used, 10.0, "the member is let in")
        began = time.monotonic()
        listening.door.close()
        assert time.monotonic() - began < 5
        member.settimeout(10)
        assert member.recv(1) == b""
    assert listening.refused == []
