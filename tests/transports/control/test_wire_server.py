"""Where the server listens, and the error when it cannot."""

from __future__ import annotations

import socket

import grpc
import pytest

from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.server import ControlServer, ListenError, PortTaken, method_path


def echo_handler() -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
def test_it_listens_at_ipv4_ipv6_and_names(host: str) -> None:
    advertised = "127.0.0.1" if host == "0.0.0.0" else None
    server = ControlServer(host, 0, threads=2, advertised_host=advertised)
    server.add_handlers("Task", {"Snapshot": echo_handler()})
    server.start()
    try:
        with open_channel(server.address) as channel:
            assert channel.unary_unary(method_path("Task", "Snapshot"))(b"hi", timeout=5) == b"hi"
    finally:
        server.stop(0)


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    server = ControlServer("127.0.0.1", 0, threads=2)
    server.add_handlers("Task", {"Snapshot": echo_handler()})
    server.start()
    try:
        with open_channel(server.address) as channel:
            assert channel.unary_unary(method_path("Task", "Snapshot"))(b"hi", timeout=5) == b"hi"
    finally:
        server.stop(0)


def test_a_taken_port_is_an_error_that_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    first = ControlServer("127.0.0.1", 0, threads=1)
    try:
        with pytest.raises(PortTaken, match=f"cannot listen at 127.0.0.1:{first.port}: the port is taken"):
            ControlServer("127.0.0.1", first.port, threads=1)
    finally:
        first.stop(0)
    assert capfd.readouterr().err == ""


def test_a_port_is_free_again_once_its_server_has_stopped() -> None:
    first = ControlServer("127.0.0.1", 0, threads=1)
    first.start()
    first.stop(0)
    second = ControlServer("127.0.0.1", first.port, threads=1)
    second.stop(0)


def test_an_address_of_another_machine_is_an_error_that_says_so() -> None:
    with pytest.raises(ListenError, match="this machine has no such address"):
        ControlServer("203.0.113.7", 0, threads=1)


def test_a_name_that_does_not_resolve_is_an_error_that_says_so() -> None:
    with pytest.raises(ListenError, match="the name does not resolve"):
        ControlServer("no-such-host.invalid", 0, threads=1)


def test_a_method_can_have_one_handler_and_only_before_the_start() -> None:
    server = ControlServer("127.0.0.1", 0, threads=1)
    server.add_handlers("Task", {"Snapshot": echo_handler()})
    with pytest.raises(RuntimeError, match="already has a handler"):
        server.add_handlers("Task", {"Snapshot": echo_handler()})
    server.start()
    with pytest.raises(RuntimeError, match="before the server starts"):
        server.add_handlers("Monitor", {"Snapshot": echo_handler()})
    server.stop(0)


def test_calls_beyond_the_threads_are_refused_at_once_instead_of_waiting() -> None:
    server = ControlServer("127.0.0.1", 0, threads=1)
    entered = socket.socketpair()

    def hold(request: bytes, context: grpc.ServicerContext) -> bytes:
        entered[1].send(b"in")
        entered[1].recv(2)
        return b"done"

    server.add_handlers("Task", {"Snapshot": grpc.unary_unary_rpc_method_handler(hold)})
    server.start()
    try:
        with open_channel(server.address) as channel:
            call = channel.unary_unary(method_path("Task", "Snapshot"))
            held = call.future(b"", timeout=10)
            assert entered[0].recv(2) == b"in"
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=5)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            entered[0].send(b"go")
            assert held.result() == b"done"
    finally:
        server.stop(0)
        for end in entered:
            end.close()
