"""``--ports=A-B``: tasks on one host share a range by trying one port after another."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from helpers.ports import free_range
from lockstep.transports.control.addresses import AddressError, interface_of, main_address
from lockstep.transports.control.ports import PortRange, PortsUsedUp, ReservedPort, listen_at, parse_ports
from lockstep.transports.control.server import ControlServer

LOOPBACK = "127.0.0.1"


def test_a_range_is_read_as_it_is_written() -> None:
    assert parse_ports("4700-4702") == PortRange(4700, 4702)
    assert str(parse_ports("4700-4702")) == "4700-4702"
    assert list(parse_ports("4700-4702")) == [4700, 4701, 4702]


@pytest.mark.parametrize("text", ["4700", "4700-", "a-b", "4702-4700", "1-99", "4700-70000", "4700-4701-4702", ""])
def test_anything_else_gets_a_sentence(text: str) -> None:
    with pytest.raises(AddressError, match="write FIRST-LAST, for example 4700-4799"):
        parse_ports(text)


def test_the_ports_of_the_lists_are_left_to_their_monitors() -> None:
    ports = PortRange(4700, 4709).without(frozenset({4703, 4709, 80}))
    assert list(ports) == [4700, 4701, 4702, 4704, 4705, 4706, 4707, 4708]
    assert ports.agreed == 4708
    assert ports.longest_run() == (4704, 4708)


def test_servers_of_one_host_take_one_port_after_another_until_none_is_left() -> None:
    ports = PortRange(*free_range(3))
    with ExitStack() as opened:
        servers = []
        for _ in range(3):
            servers.append(ControlServer(LOOPBACK, 0, threads=2, ports=ports))
            opened.callback(servers[-1].stop, 0)
        assert [server.port for server in servers] == list(ports)
        with pytest.raises(PortsUsedUp, match=rf"every port of --ports={ports} is taken at {LOOPBACK}; give a larger"):
            ControlServer(LOOPBACK, 0, threads=2, ports=ports)


def test_a_reserved_port_is_not_taken_by_one_who_tries_and_is_open_to_one_who_names_it() -> None:
    ports = PortRange(*free_range(2))
    with ReservedPort("", ports) as reserved, listen_at(LOOPBACK, ports) as other:
        assert (reserved.port, other.getsockname()[1]) == (ports.first, ports.last)
        server = ControlServer(LOOPBACK, reserved.port, threads=2)
        server.stop(0)


def test_a_port_that_only_an_ended_connection_keeps_is_taken_when_no_other_is_left() -> None:
    ports = PortRange(*free_range(1))
    with listen_at(LOOPBACK, ports) as listener, socket.create_connection(listener.getsockname()) as caller:
        accepted, _ = listener.accept()
        accepted.close()  # this end closes first, and keeps the port for a while
        assert caller.recv(1) == b""
    with listen_at(LOOPBACK, ports) as again:
        assert again.getsockname()[1] == ports.first


def test_an_address_of_this_machine_has_an_interface_and_no_other_address_has() -> None:
    loopback = interface_of(LOOPBACK)
    assert loopback is not None
    assert interface_of("127.1.2.3") == loopback
    assert interface_of("localhost") == loopback
    assert interface_of("0.0.0.0") is None
    assert interface_of("203.0.113.77") is None
    assert interface_of(main_address()) is not None
