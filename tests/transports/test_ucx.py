"""What is special about NIXL: it must be polled, and its metadata are bytes from a peer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time

import pytest

from lockstep.transports import registry
from lockstep.transports.base import TransportError
from lockstep.transports.conformance.events import EventLog
from lockstep.transports.conformance.stage import Stage
from lockstep.transports.control.server import ControlServer
from lockstep.transports.ucx.driver import pause_after, pause_beside_a_device

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
