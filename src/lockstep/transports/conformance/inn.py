"""Keeps nodes of the suite on another host: ``python -m lockstep.transports.conformance.inn HOST:PORT`` there, and
``python -m lockstep.transports.conformance TRANSPORT --inn HOST:PORT`` here.

For tests on hosts of one's own: whoever reaches the port can start node processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.processes import NODE_MODULE, freeze_child

_LONGEST_LINE = 4096


class Inn:
    """The node processes of this host, by incarnation."""

    def __init__(self) -> None:
        self._guests: dict[str, subprocess.Popen[bytes]] = {}

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

    def _welcome(self, connection: socket.socket) -> None:
        with connection:
            line = _first_line(connection)
            if not line.endswith(b"\n"):
                return
            words = json.loads(line)
            if "start" in words:
                transport, task, incarnation, host = words["start"]
                command = [sys.executable, "-m", NODE_MODULE, transport, task, incarnation, host]
                # The connection itself is what the node reads and writes.
                self._guests[incarnation] = subprocess.Popen(
                    command, stdin=connection.fileno(), stdout=connection.fileno()
                )
                return
            connection.sendall(json.dumps(self._answer(words)).encode() + b"\n")

    def _answer(self, words: dict[str, Any]) -> dict[str, Any]:
        guest = self._guests.get(words["incarnation"])
        if guest is None:
            return {"error": "there is no such node here"}
        try:
            return {"answer": self._do(guest, words["ask"], float(words["seconds"]))}
        except (OSError, CaseFailed, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}

    def _do(self, guest: subprocess.Popen[bytes], what: str, seconds: float) -> int | bool:
        if what == "kill":
            guest.kill()
            guest.wait(seconds)
        elif what == "freeze":
            freeze_child(guest.pid)
        elif what == "resume":
            with contextlib.suppress(ProcessLookupError):
                os.kill(guest.pid, signal.SIGCONT)
        elif what == "wait":
            try:
                guest.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        return True if what != "pid" else guest.pid


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
    inn = Inn()
    try:
        with socket.create_server((host, int(port)), backlog=16) as listener:
            sys.stdout.write(f"Waiting at {sys.argv[1]}\n")
            sys.stdout.flush()
            inn.serve(listener)
    finally:
        inn.close()


if __name__ == "__main__":
    main()
