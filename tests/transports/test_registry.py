"""Transports by name."""

from __future__ import annotations

import pytest

from helpers.transports import RUN_HERE
from lockstep.security.chosen import chosen_key
from lockstep.transports import registry
from lockstep.transports.base import TransportError
from lockstep.transports.control.server import ControlServer
from lockstep.transports.registry import make_transport, runs_here


def test_each_known_name_gives_a_transport_of_that_name() -> None:
    for name in RUN_HERE:
        server = ControlServer("127.0.0.1", 0, threads=4)
        transport = make_transport(name, server, "/t", 1, None)
        assert transport.name == name
        transport.close()
        server.stop(0)


@pytest.mark.parametrize("name", ["grpc+ucx", "grpc+verbs"])
def test_what_cannot_encrypt_is_refused_where_tensors_are_private(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "missing_library", lambda _: None)
    server = ControlServer("127.0.0.1", 0, threads=4)
    with pytest.raises(TransportError, match="cannot encrypt, and --require_private asks for that: use auto or grpc"):
        make_transport(name, server, "/t", 1, chosen_key(), private=True)
    server.stop(0)


def test_what_can_encrypt_does_so_where_tensors_are_private() -> None:
    for name in ("auto", "grpc+tcp", "grpc"):
        server = ControlServer("127.0.0.1", 0, threads=4)
        transport = make_transport(name, server, "/t", 1, chosen_key(), private=True)
        assert b"plain://" not in transport.address()
        assert (b"tls://" in transport.address()) == (name != "grpc")
        transport.close()
        server.stop(0)


@pytest.mark.skipif(runs_here("grpc+verbs"), reason="this machine has an RDMA device")
def test_without_a_device_rdma_is_refused_with_what_was_looked_for_and_what_to_do() -> None:
    server = ControlServer("127.0.0.1", 0, threads=4)
    with pytest.raises(TransportError, match=r"needs an RDMA device, but /sys/class/infiniband shows none; load the"):
        make_transport("grpc+verbs", server, "/t", 1, None)
    server.stop(0)


def test_an_unknown_name_lists_the_known_ones_and_suggests_the_nearest() -> None:
    server = ControlServer("127.0.0.1", 0, threads=4)
    with pytest.raises(TransportError, match=r"no transport 'gprc', only auto, grpc.*did you mean grpc\?"):
        make_transport("gprc", server, "/t", 1, None)
    with pytest.raises(TransportError, match="no transport 'pigeon', only auto, grpc"):
        make_transport("pigeon", server, "/t", 1, None)
    server.stop(0)
