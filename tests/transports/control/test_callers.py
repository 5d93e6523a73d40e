"""A port of gRPC knows who was refused there: by the address, and by how the connection began."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from helpers.keys import another_key, no_key
from helpers.refused_callers import call, connect, not_tls, refused_here, wait_for_refusal, without_certificate
from helpers.waiting import wait_until
from lockstep.security.refusals import Entrance
from lockstep.transports.control.callers import CallerWatch, host_in
from lockstep.transports.control.channels import PLAIN, open_data_channel
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.control.tcp_probe import probe
from lockstep.transports.quiet_grpc import grpc

ECHO = {"Data": grpc.stream_stream_rpc_method_handler(lambda incoming, _: incoming)}


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", 0, threads=8, entrance=Entrance.MONITOR)
    server.add_handlers("Task", ECHO)
    server.start()
    yield server
    server.stop(0.1)


def spend_all(watch: CallerWatch) -> None:
    """As after a flood: nothing more is looked at for now."""
    watch._budget = -1.0


def is_answered(address: str) -> bool:
    with open_data_channel(address) as channel:
        return list(channel.stream_stream(method_path("Task", "Data"))(iter([b"x"]), timeout=10)) == [b"x"]


def test_a_caller_without_a_certificate_is_named(server: ControlServer) -> None:
    without_certificate(server.address, "127.0.0.71")
    wait_for_refusal(Entrance.MONITOR, "127.0.0.71", "unproven")


def test_a_caller_that_does_not_speak_tls_is_named(server: ControlServer) -> None:
    not_tls(server.address, "127.0.0.72")
    wait_for_refusal(Entrance.MONITOR, "127.0.0.72", "malformed")


def test_a_caller_with_another_key_is_named(server: ControlServer, tmp_path: Path) -> None:
    with another_key(tmp_path):
        call(server.address)
    wait_for_refusal(Entrance.MONITOR, "127.0.0.1", "unproven")


def test_a_caller_that_runs_without_a_key_is_named(server: ControlServer) -> None:
    with no_key():
        call(server.address)
    wait_for_refusal(Entrance.MONITOR, "127.0.0.1", "no key there")


def test_members_and_those_that_only_try_the_port_are_not_refused(server: ControlServer) -> None:
    before, watch = refused_here(), server._main._watch
    assert watch is not None
    for _ in range(20):
        assert probe(server.address).is_open
    for number in range(40):
        if number >= 20:
            spend_all(watch)
        assert is_answered(server.address)
    wait_until(lambda: not watch._pending and watch._unseen == [0, 0], 10.0, "all are known")
    assert refused_here() == before


@pytest.mark.slow
def test_those_that_come_too_fast_to_be_looked_at_are_counted(server: ControlServer) -> None:
    before, watch = refused_here(), server._main._watch
    assert watch is not None
    for _ in range(20):
        not_tls(server.address, "127.0.0.74")
        spend_all(watch)
    wait_until(lambda: refused_here() == before + 20, 30.0, "all are counted")


@pytest.mark.slow
def test_a_silent_caller_is_named_when_its_time_is_over(server: ControlServer) -> None:
    with connect(server.address, "127.0.0.75") as silent:
        silent.settimeout(30.0)
        assert silent.recv(1) == b""
    wait_for_refusal(Entrance.MONITOR, "127.0.0.75", "late")


@pytest.mark.slow
def test_a_silent_caller_at_the_port_without_tls_is_named_once(server: ControlServer) -> None:
    other = ControlServer("127.0.0.1", 0, threads=8)
    address = other.add_bulk_handlers("Task", ECHO)
    other.start()
    try:
        before = refused_here()
        with connect(address.removeprefix(PLAIN), "127.0.0.76") as silent:
            assert is_answered(address)
            wait_for_refusal(Entrance.TENSORS, "127.0.0.76", "late")
            silent.settimeout(30.0)
            while silent.recv(1024):  # the preface of HTTP/2, and then the end
                pass
        assert refused_here() == before + 1
    finally:
        other.stop(0.1)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:40000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:40000", "::1"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4", "10.0.0.1"),
    ],
)
def test_the_host_in_a_name_of_grpc(peer: str, host: str) -> None:
    assert host_in(peer) == host


def test_a_socket_is_only_borrowed(server: ControlServer) -> None:
    """Blocking sockets would stop gRPC, and closed ones are somebody else's soon."""
    with open_data_channel(server.address) as channel:
        talk = channel.stream_stream(method_path("Task", "Data"))
        assert list(talk(iter([b"1"]), timeout=10)) == [b"1"]
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                line.sendall(b"?")
        come = partial(not_tls, server.address, "127.0.0.77")
        wait_for_refusal(Entrance.MONITOR, "127.0.0.77", "malformed", come)
        assert list(talk(iter([b"2"]), timeout=10)) == [b"2"]
