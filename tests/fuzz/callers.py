"""Calls with the job's key and mutated bytes: inside of TLS, as requests, and as the first message of a link."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fuzz.mutation import mutated
from fuzz.wire_targets import wire_targets
from lockstep.security.certificates import NAME
from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.codec import join_envelopes
from lockstep.transports.control.credentials import own_certificates
from lockstep.transports.control.server import method_path
from lockstep.transports.quiet_grpc import grpc

CALL_SECONDS: Final = 10.0
BRIEFLY: Final = 0.2
"""How long a stream that does not end by itself is heard."""
UNARY: Final = (
    *(("Monitor", "Describe"), ("Monitor", "Snapshot"), ("Monitor", "Stack")),
    *(("Task", "Snapshot"), ("Task", "Witness"), ("Doctor", "Tell")),
)
STREAMS: Final = (("Monitor", "Watch"), ("Task", "Link"), ("Task", "Data"), ("Task", "Ucx"))
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


class KeyedCaller:
    """Reaches any port as a member of the job does."""

    def __init__(self, given: Sequence[bytes], folder: Path) -> None:
        """``given``: seeds for what is sent inside of TLS."""
        self._given = given
        self.requests = [seed for target in wire_targets() for seed in target.seeds]
        single = [seed for target in wire_targets() if target.name.startswith("control: Env") for seed in target.seeds]
        self.joined = [join_envelopes([one]) for one in single]
        self._tls = _client_side(folder)

    def visit(self, address: str, chance: random.Random) -> None:
        """One visit of any kind. ``OSError`` and ``grpc.RpcError``: it was refused."""
        kinds: tuple[Callable[[str, random.Random], object], ...] = (self.inside_tls, self.calls, self.stream)
        chance.choice(kinds)(address, chance)

    def inside_tls(self, address: str, chance: random.Random | None) -> bool:
        """Whether it answers."""
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=CALL_SECONDS) as line,
            self._tls.wrap_socket(line, server_hostname=NAME) as shaken,
        ):
            shaken.sendall(_HTTP2 if chance is None else mutated(chance, self._given)[: 1 << 16])
            shaken.settimeout(CALL_SECONDS if chance is None else 0.05)
            return bool(shaken.recv(65536))

    def calls(self, address: str, chance: random.Random) -> None:
        with open_channel(address) as channel:
            for _ in range(8):
                call = channel.unary_unary(method_path(*chance.choice(UNARY)))
                with contextlib.suppress(grpc.RpcError):
                    call(mutated(chance, self.requests), timeout=CALL_SECONDS)

    def stream(self, address: str, chance: random.Random) -> None:
        """A link or a data stream from its first message on."""
        sent = [mutated(chance, self.joined if chance.random() < 0.5 else self.requests) for _ in range(3)]
        with open_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            call = channel.stream_stream(method_path(*chance.choice(STREAMS)))
            list(call(iter(sent), timeout=BRIEFLY))


def _client_side(folder: Path) -> ssl.SSLContext:
    own = own_certificates()
    assert own is not None
    pem = folder / "member.pem"
    pem.touch(0o600)
    pem.write_bytes(own.certificate + own.private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=own.authority.decode())
    context.load_cert_chain(pem)
    context.set_alpn_protocols(["h2"])
    return context


def raised(output: str) -> list[str]:
    """Exceptions that no code took: the end of a thread, or of a call that should have refused its input."""
    at = output.find("Traceback")
    return [] if at < 0 else [f"an exception ended a thread or a call: {output[max(0, at - 200) : at + 3000]}"]
