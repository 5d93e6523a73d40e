"""How the two processes of a measurement talk: one JSON object per line, over a TCP connection."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from lockstep.foreign import JsonError, plain, read_json

CALL_SECONDS: Final = 60.0
_MAX_LINE: Final = 1 << 20

Methods = Mapping[str, Callable[..., Any]]


class NetError(Exception):
    """The measurement cannot continue; the text says why."""


class Caller:
    """The end that asks."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = socket.create_connection((host, port), timeout=CALL_SECONDS)
        except OSError as error:
            raise NetError(
                f"nothing answers at {host}:{port} ({error.strerror or error}); start 'lockstep net --serve' there"
            ) from error
        self._lines = self._socket.makefile("rwb")

    @property
    def local_host(self) -> str:
        """This machine's address as the peer sees it."""
        return str(self._socket.getsockname()[0])

    @property
    def remote_host(self) -> str:
        return str(self._socket.getpeername()[0])

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the peer, and wait for the answer."""
        try:
            self._lines.write(json.dumps({"call": method, "with": arguments}).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline(_MAX_LINE)
        except OSError as error:
            raise NetError(f"the peer did not answer {method}: {error}") from error
        if not line:
            raise NetError(f"the peer hung up during {method}")
        try:
            answer = read_json(line, _MAX_LINE)
        except JsonError as error:
            raise NetError(f"the peer's answer to {method} cannot be read: {error}") from error
        if not isinstance(answer, dict) or "error" in answer or "result" not in answer:
            said = answer.get("error") if isinstance(answer, dict) else answer
            raise NetError(plain(str(said), 500))
        return answer["result"]

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def answer_calls(connection: socket.socket, methods: Methods, expected: tuple[type[Exception], ...]) -> None:
    """The end that answers: serve one caller until it hangs up."""
    with contextlib.suppress(OSError), connection, connection.makefile("rwb") as lines:
        while line := lines.readline(_MAX_LINE):
            lines.write(json.dumps(_answer(line, methods, expected)).encode() + b"\n")
            lines.flush()


def _answer(line: bytes, methods: Methods, expected: tuple[type[Exception], ...]) -> dict[str, Any]:
    try:
        asked = read_json(line, _MAX_LINE)
        method = methods[asked["call"]]
        return {"result": method(**asked["with"])}
    except expected as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the next caller needs this process, whatever this one has sent
        return {"error": plain(f"this call is not valid: {type(error).__name__}: {error}", 500)}
