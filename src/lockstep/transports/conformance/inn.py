"""Keeps nodes of the suite on another host: ``python -m lockstep.transports.conformance.inn HOST:PORT`` there, and
``python -m lockstep.transports.conformance TRANSPORT --inn HOST:PORT`` here.

For tests on hosts of one's own: whoever reaches the port can start node processes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from typing import Any

from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.forks import Forked, Forks

_LONGEST_LINE = 4096


class Inn:
    """The node processes of this host, by incarnation."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._guests: dict[str, Forked] = {}

    def serve(self, listener: socket.socket) -> None:
        """Until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Nobody is left behind."""
        for guest in self._guests.values():
            guest.kill()
        self._forks.close()

    def _welcome(self, connection: socket.socket) -> None:
        with connection:
            line = _first_line(connection)
            if not line.endswith(b"\n"):
                return
            words = json.loads(line)
            if "start" in words:
                incarnation = words["start"][2]
                # The connection itself is what the node reads and writes.
                self._guests[incarnation] = self._forks.start(words["start"], connection.fileno(), connection.fileno())
                return
            connection.sendall(json.dumps(self._answer(words)).encode() + b"\n")

    def _answer(self, words: dict[str, Any]) -> dict[str, Any]:
        guest = self._guests.get(words["incarnation"])
        if guest is None:
            return {"error": "there is no such node here"}
        try:
            return {"answer": self._do(guest, words["ask"], float(words["seconds"]))}
        except (OSError, CaseFailed) as error:
            return {"error": str(error)}

    def _do(self, guest: Forked, what: str, seconds: float) -> int | bool:
        match what:
            case "pid":
                return guest.pid
            case "kill":
                guest.kill()
            case "freeze":
                guest.freeze()
            case "resume":
                guest.resume()
            case "wait":
                return guest.has_ended(seconds)
        return True


def _first_line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows the line is for the node."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    inn = Inn(Forks())  # before there are threads
    try:
        with socket.create_server((host, int(port)), backlog=16) as listener:
            sys.stdout.write(f"Waiting at {host}:{listener.getsockname()[1]}\n")
            sys.stdout.flush()
            inn.serve(listener)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how it ends
    finally:
        inn.close()


if __name__ == "__main__":
    main()
