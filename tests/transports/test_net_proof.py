"""``lockstep net --serve`` serves whoever proves to have the same key; nothing else ends it or holds it up."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from helpers.keys import make_key
from helpers.refused_callers import wait_for_refusal
from lockstep.security import strangers
from lockstep.security.chosen import chosen_key
from lockstep.security.key import find_key
from lockstep.security.refusals import Entrance
from lockstep.transports.net import serving
from lockstep.transports.net.control import TCP, Caller, NetError, connect_proven
from lockstep.transports.net.serving import NetServer


class Served:
    """A server of this process, and where it is."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.server = NetServer(listener, chosen_key())

    def caller(self) -> closing[Caller]:
        return closing(Caller("127.0.0.1", self.port, chosen_key()))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def check(self) -> None:
        """It still serves."""
        with self.caller() as caller:
            assert caller.call("cpu") > 0


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


@pytest.mark.parametrize(
    "noise",
    [
        b'{"call": "prepare", "with": {"transport": "grpc", "nbytes": 1073741824}}\n',
        b"[" * 100000 + b"\n",
        b"\xff\xfe\n",
        struct.pack("<I", 3) + b"{}\n",
    ],
)
def test_noise_is_refused_and_the_next_caller_is_served(served: Served, noise: bytes) -> None:
    with served.connect() as stranger, suppress(OSError):
        stranger.sendall(noise)
        assert b"result" not in stranger.recv(65536)
    served.check()


def test_another_key_and_none_are_refused_with_the_reason(served: Served, tmp_path: Path) -> None:
    with pytest.raises(NetError, match="does not know this job's key"):
        Caller("127.0.0.1", served.port, find_key(make_key(tmp_path / "other")))
    with pytest.raises(NetError, match="wants a key"):
        Caller("127.0.0.1", served.port, None)
    wait_for_refusal(Entrance.NET, "127.0.0.1", "no key there")
    served.check()


def test_silent_connections_hold_up_nobody(served: Served) -> None:
    with ExitStack() as silent:
        for _ in range(3 * strangers.PLACES):
            silent.enter_context(served.connect())
        served.check()


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100000,
        b"rubbish",
        b"[]",
        b"{}",
        json.dumps({"call": "pigeon", "with": {}}).encode(),
        json.dumps({"call": "cpu", "with": []}).encode(),
        json.dumps({"call": "link", "with": {"transport": "grpc"}}).encode(),
        json.dumps({"call": "prepare", "with": {"transport": "grpc", "nbytes": "many"}}).encode(),
        json.dumps({"call": "poll", "with": {"on": True}}).encode(),
    ],
)
def test_a_call_that_makes_no_sense_is_answered_and_the_next_one_too(served: Served, line: bytes) -> None:
    with served.caller() as caller:
        caller._proven.send(line, time.monotonic() + 10)
        assert "error" in json.loads(caller._proven.receive(1 << 20, time.monotonic() + 10))
        assert caller.call("cpu") > 0


def test_what_a_caller_can_have_allocated_is_bounded(served: Served) -> None:
    with served.caller() as caller:
        for nbytes in (0, -1, serving.MAX_BYTES + 1, 2**80):
            with pytest.raises(NetError):
                caller.call("tcp", nbytes=nbytes)
        caller.call("tcp", nbytes=4096)
        with pytest.raises(NetError, match="already has a region"):
            caller.call("tcp", nbytes=4096)


def test_the_bare_socket_takes_the_caller_only_and_no_more_than_it_has_room_for(served: Served) -> None:
    with served.caller() as caller:
        port = caller.call("tcp", nbytes=4096)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(struct.pack("<Q", 4) + b"1234")
            assert b"!" not in stranger.recv(100)
        with connect_proven("127.0.0.1", port, TCP, caller.key).socket as line:
            line.settimeout(10)
            line.sendall(struct.pack("<Q", 4) + b"1234")
            assert line.recv(1) == b"!"
            line.sendall(struct.pack("<Q", 4097))
            assert line.recv(1) == b""
