"""What is special about NIXL: it must be polled, and its metadata are bytes from a peer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from helpers.ports import free_range
from lockstep.transports import registry
from lockstep.transports.base import TransportError
from lockstep.transports.conformance.events import EventLog
from lockstep.transports.conformance.stage import Stage
from lockstep.transports.control.addresses import main_address
from lockstep.transports.control.ports import PortRange
from lockstep.transports.control.server import ControlServer
from lockstep.transports.ucx.driver import pause_after, pause_beside_a_device
from lockstep.transports.ucx.network import tcp_settings

pytestmark = pytest.mark.skipif(registry.missing_library("grpc+ucx") is not None, reason="NIXL is not installed")


def cpu_share(seconds: float) -> float:
    before, began = time.process_time(), time.monotonic()
    with pytest.raises(AssertionError):
        EventLog("nobody").wait("nothing", seconds=seconds)
    return (time.process_time() - before) / (time.monotonic() - began)


def test_an_idle_link_uses_less_than_three_percent_of_a_core() -> None:
    with Stage("grpc+ucx") as stage:
        pair = stage.pair()
        way = pair.way(4096)
        way.write(0, 4096, 0)
        pair.b.log.wait("arrived")
        alone = cpu_share(0.5)  # whatever else runs in this process, such as gRPC's own threads
        assert cpu_share(1.0) < 0.03 + alone


def test_a_frozen_peer_is_polled_seldom() -> None:
    assert pause_after(0.0) < 1e-4
    assert pause_after(2.0) == pytest.approx(2e-3)
    assert pause_after(3600.0) == pytest.approx(2e-3)


def test_beside_a_device_polling_makes_a_transfer_longer_by_a_twentieth_at_most() -> None:
    for seconds in (1e-3, 10e-3, 30e-3):
        assert pause_beside_a_device(seconds) == pytest.approx(seconds / 20)
    assert 0.0 < pause_beside_a_device(0.0) < 1e-4
    assert pause_beside_a_device(3600.0) == pytest.approx(2e-3)


def test_without_nixl_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    server = ControlServer("127.0.0.1", 0, threads=4)
    with pytest.raises(TransportError, match=r"pip install -c constraints.txt 'lockstep-torch\[ucx\]'"):
        registry.make_transport("grpc+ucx", server, "/t", 1, None)
    server.stop(0)


def test_nixl_is_not_loaded_before_it_is_asked_for() -> None:
    code = "import sys; import lockstep.transports.registry, lockstep.transports.auto.transport\n" + (
        "sys.exit(any('nixl' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


LISTENERS = """
import os, sys
from lockstep.runtime.listening import listening_sockets
from lockstep.transports.control.ports import parse_ports
from lockstep.transports.ucx.agent import Agent, AgentError
from lockstep.transports.ucx.network import nixl_at
host, ports, count = sys.argv[1], parse_ports(sys.argv[2]), int(sys.argv[3])
nixl = nixl_at(host, ports)
agents = []
try:
    for number in range(count):
        agents.append(Agent(nixl, str(number)))
except AgentError as error:
    print(error)
for one in listening_sockets([os.getpid()]):
    print(one.address, one.port)
"""


def agents_at(host: str, ports: PortRange, count: int, **environment: str) -> list[list[str]]:
    """What a process with so many agents prints: an error, and where it listens."""
    command = [sys.executable, "-c", LISTENERS, host, str(ports), str(count)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=True, env={**os.environ, **environment}
    )
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("host", sorted({"127.0.0.1", main_address()}))
def test_ucx_listens_at_the_listed_address_only_and_in_the_range(host: str) -> None:
    ports = PortRange(*free_range(8))
    found = agents_at(host, ports, 8)
    assert {address for address, _ in found} == {host}
    assert sorted(int(port) for _, port in found) == list(ports)


def test_a_range_that_ucx_has_used_up_is_named() -> None:
    ports = PortRange(*free_range(2))
    error, *found = agents_at("127.0.0.1", ports, 3)
    assert f"each link over UCX takes one port, and every port of --ports={ports} is taken" in " ".join(error)
    assert len(found) == 2


def test_devices_that_the_user_has_named_stay() -> None:
    assert ("UCX_NET_DEVICES", "lo") in tcp_settings("127.0.0.1")
    assert ("UCX_TCP_AF_PRIO", "inet") in tcp_settings("127.0.0.1")
    assert "UCX_NET_DEVICES" not in dict(tcp_settings("0.0.0.0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "eth7")
        assert "UCX_NET_DEVICES" not in dict(tcp_settings("127.0.0.1"))
