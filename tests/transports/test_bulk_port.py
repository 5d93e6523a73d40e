"""Streams of tensors have a port without TLS, which serves nothing else; --require_private does without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.keys import no_key
from lockstep.protocol.core.causes import Reason
from lockstep.security.chosen import chosen_key
from lockstep.transports.base import Loan, PeerAddress
from lockstep.transports.control.channels import PLAIN, open_data_channel, open_plain_channel
from lockstep.transports.control.monitor_service import snapshot_handler
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.grpc.transport import GrpcTransport
from lockstep.transports.quiet_grpc import grpc

PATIENCE = 10.0


class _Events:
    def __init__(self) -> None:
        self.up = threading.Event()
        self.lost = threading.Event()
        self.reason = ""

    def on_up(self) -> None:
        self.up.set()

    def on_lost(self, reason: Reason) -> None:
        self.reason = reason.text
        self.lost.set()

    def on_sent(self, transfer: int) -> None: ...

    def on_failed(self, transfer: int, reason: str) -> None: ...

    def on_arrived(self, note: bytes, nbytes: int) -> None: ...

    def on_lent(self, note: bytes, loan: Loan) -> None: ...

    def on_word(self, word: bytes) -> None: ...


class _Task:
    """One end, with a service besides its data streams."""

    def __init__(self, name: str, life: int, private: bool) -> None:
        self.server = ControlServer("127.0.0.1", 0, threads=8)
        self.transport = GrpcTransport(self.server, name, life, chosen_key(), private=private)
        self.server.add_handlers("Task", {"Snapshot": snapshot_handler(lambda: b"{}")})
        self.server.start()
        self.events = _Events()
        self.address = PeerAddress(name, life, self.transport.address())

    def link(self, peer: _Task, dials: bool) -> None:
        self.transport.connect(peer.address, dials, self.events)

    def close(self) -> None:
        self.transport.close()
        self.server.stop(0)


@contextmanager
def two_tasks(private: tuple[bool, bool] = (False, False)) -> Iterator[tuple[_Task, _Task]]:
    one, other = _Task("/job:worker/replica:0/task:0", 1, private[0]), _Task("/job:ps/replica:0/task:0", 2, private[1])
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def test_tensors_travel_without_tls_between_ends_that_have_proven_themselves() -> None:
    with two_tasks() as (one, other):
        assert other.address.address.startswith(PLAIN.encode())
        other.link(one, dials=False)
        one.link(other, dials=True)
        assert one.events.up.wait(PATIENCE), one.events.reason


def test_the_port_of_tensors_serves_no_other_call() -> None:
    with two_tasks() as (one, _):
        bulk = one.address.address.decode().removeprefix(PLAIN)
        assert bulk != one.server.address
        for service, method in (("Task", "Snapshot"), ("Task", "Link"), ("Monitor", "Describe")):
            with open_plain_channel(bulk) as channel, pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(method_path(service, method))(b"", timeout=PATIENCE)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_require_private_encrypts_tensors_too_and_has_no_second_port() -> None:
    with two_tasks((True, True)) as (one, other):
        assert other.address.address.decode() == other.server.address
        other.link(one, dials=False)
        one.link(other, dials=True)
        assert one.events.up.wait(PATIENCE), one.events.reason
        with open_plain_channel(other.server.address) as channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream(method_path("Task", "Data"))(iter([b"x"]), timeout=PATIENCE))


def test_a_private_end_does_not_dial_one_that_sends_in_the_clear() -> None:
    with two_tasks((True, False)) as (one, other):
        one.link(other, dials=True)
        assert one.events.lost.wait(PATIENCE)
        assert "--require_private" in one.events.reason


def test_insecure_tasks_have_one_port() -> None:
    with no_key(), two_tasks() as (one, other):
        assert other.address.address.decode() == other.server.address
        other.link(one, dials=False)
        one.link(other, dials=True)
        assert one.events.up.wait(PATIENCE), one.events.reason
        with open_data_channel(one.server.address) as channel:
            assert channel.unary_unary(method_path("Task", "Snapshot"))(b"", timeout=PATIENCE)
