"""Callers that a port refuses, each from an address of its own, so that a test can tell whom a line is about."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from helpers.waiting import wait_until
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.transports.control.channels import open_data_channel
from lockstep.transports.control.server import method_path
from lockstep.transports.quiet_grpc import grpc

SECONDS = 5.0


def connect(place: str, source: str) -> socket.socket:
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)), SECONDS, (source, 0))


def without_certificate(place: str, source: str) -> None:
    """TLS, and no certificate; ends when the port has hung up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with suppress(OSError), connect(place, source) as line, context.wrap_socket(line) as shaken:
        shaken.recv(1)


def not_tls(place: str, source: str) -> None:
    with suppress(OSError), connect(place, source) as line:
        line.sendall(b"GET / HTTP/1.0\r\n\r\n")
        line.recv(1)


def call(address: str, service: str = "Task", method: str = "Data") -> None:
    """A call by gRPC, with the key that is chosen now, or without TLS to a port without it."""
    with open_data_channel(address) as channel, suppress(grpc.RpcError):
        list(channel.stream_stream(method_path(service, method))(iter([b""]), timeout=SECONDS))


def refused_here() -> int:
    """How many callers this process has refused so far."""
    summary = REFUSALS.summary()
    return 0 if summary is None else int(summary["callers"])


def wait_for_refusal(entrance: Entrance, caller: str, why: str, come_again: Callable[[], None] = lambda: None) -> None:
    """Until the last that was refused is this one. ``come_again``: where others may be noted after it."""

    def last() -> tuple[str, str, str]:
        one = (REFUSALS.summary() or {"last": {"entrance": "", "caller": "", "why": ""}})["last"]
        return one["entrance"], one["caller"], one["why"]

    def is_refused() -> bool:
        come_again()
        return last() == (entrance.value, caller, why)

    wait_until(is_refused, 2 * SECONDS, f"{caller} is refused: {why}")
