"""How the two processes of a measurement talk: one JSON object per message, over a TCP connection.

Both ends first prove that they know the user's key (``security/wire.py``), and every message after that has a MAC:
whoever calls can have memory allocated and written here.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from lockstep.foreign import JsonError, plain, read_json
from lockstep.security.key import Key, Purpose
from lockstep.security.proof import Parties, ProofError, Refusal
from lockstep.security.wire import PROOF_SECONDS, Claim, ProvenSocket, dial
from lockstep.transports.control.ports import PortRange
from lockstep.version import __version__

TCP, BARE_GRPC = "TCP socket", "bare grpcio"
"""What the transports are compared with, and what a connection of theirs is for."""
CALL_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 600.0
"""How long a caller may measure between two calls."""
_MAX_MESSAGE: Final = 1 << 20

Methods = Mapping[str, Callable[..., Any]]


class NetError(Exception):
    """The measurement cannot continue; the text says why."""


def net_parties(purpose: str) -> Parties:
    """The two ends of any connection of a measurement."""
    return Parties(purpose=purpose, dialer="caller", acceptor="server", version=__version__)


def net_key(key: Key | None) -> bytes | None:
    return None if key is None else key.sub(Purpose.DATA)


def believed(purpose: str) -> Callable[[Claim], Parties]:
    """For an acceptor: a visitor can only be the caller."""
    return lambda _: net_parties(purpose)


def connect_proven(host: str, port: int, purpose: str, key: Key | None) -> ProvenSocket:
    """A connection to the server of a measurement. ``OSError`` if nothing listens there, NetError if it is another."""
    connection = socket.create_connection((host, port), timeout=CALL_SECONDS)
    try:
        return dial(connection, net_key(key), net_parties(purpose), time.monotonic() + PROOF_SECONDS)
    except ProofError as error:
        connection.close()
        raise NetError(_why_not(error.refusal, f"{host}:{port}", error)) from error


def _why_not(refusal: Refusal, where: str, error: ProofError) -> str:
    if refusal is Refusal.OTHER_VERSION:
        return f"{where} does not run Lockstep {__version__}, as this side does; install the same version on both"
    return f"cannot measure with {where}: {error}"


class Caller:
    """The end that asks."""

    def __init__(self, host: str, port: int, key: Key | None, ports: PortRange | None = None) -> None:
        """``ports``: where this process listens for the peer."""
        self.key = key
        self.ports = ports
        try:
            self._proven = connect_proven(host, port, "net", key)
        except OSError as error:
            raise NetError(
                f"nothing answers at {host}:{port} ({error.strerror or error}); start 'lockstep net --serve' there"
            ) from error
        self._proven.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_host(self) -> str:
        """This machine's address as the peer sees it."""
        return str(self._proven.socket.getsockname()[0])

    @property
    def remote_host(self) -> str:
        return str(self._proven.socket.getpeername()[0])

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the peer, and wait for the answer."""
        deadline = time.monotonic() + CALL_SECONDS
        try:
            self._proven.send(json.dumps({"call": method, "with": arguments}).encode(), deadline)
            answer = read_json(self._proven.receive(_MAX_MESSAGE, deadline))
        except (ProofError, JsonError) as error:
            raise NetError(f"the peer did not answer {method}: {error}") from error
        if not isinstance(answer, dict) or "result" not in answer:
            raise NetError(plain(str(answer.get("error"))) if isinstance(answer, dict) else f"{method} has no answer")
        return answer["result"]

    def close(self) -> None:
        self._proven.close()


def answer_calls(connection: ProvenSocket, methods: Methods, expected: tuple[type[Exception], ...]) -> None:
    """The end that answers: serve one caller until it hangs up. The text of an expected error is its answer."""
    with connection.socket:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                line = connection.receive(_MAX_MESSAGE, time.monotonic() + IDLE_SECONDS)
                connection.send(json.dumps(_answer(line, methods, expected)).encode(), time.monotonic() + CALL_SECONDS)
            except ProofError:
                return


def _answer(line: bytes, methods: Methods, expected: tuple[type[Exception], ...]) -> dict[str, Any]:
    """Whatever goes wrong in a call is the caller's answer, and never ends this process."""
    try:
        asked = read_json(line)
        return {"result": methods[asked["call"]](**asked["with"])}
    except expected as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a call must not end the server
        return {"error": f"this call failed: {type(error).__name__}: {error}"}
