"""Starts nodes of the suite for another machine: ``python -m conformance_hosts.node_host HOST:PORT`` there, and
``python -m conformance_hosts TRANSPORT --node_host HOST:PORT`` here.

For tests between your own machines only: anyone who reaches the port can start node processes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from typing import Any

from conformance_hosts.forks import ForkedNode, Forks
from lockstep.transports.conformance.events import CaseFailed

_LONGEST_LINE = 4096


class NodeHost:
    """The node processes of this machine, by incarnation."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._nodes: dict[str, ForkedNode] = {}

    def serve(self, listener: socket.socket) -> None:
        """Serve until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Leave no process behind."""
        for node in self._nodes.values():
            node.kill()
        self._forks.close()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            line = _first_line(connection)
            if not line.endswith(b"\n"):
                return
            words = json.loads(line)
            if "start" in words:
                incarnation = words["start"][2]
                # The connection itself is what the node reads and writes.
                self._nodes[incarnation] = self._forks.start(words["start"], connection.fileno(), connection.fileno())
                return
            connection.sendall(json.dumps(self._answer(words)).encode() + b"\n")

    def _answer(self, words: dict[str, Any]) -> dict[str, Any]:
        node = self._nodes.get(words["incarnation"])
        if node is None:
            return {"error": "there is no such node here"}
        try:
            return {"answer": self._do(node, words["ask"], float(words["seconds"]))}
        except (OSError, CaseFailed) as error:
            return {"error": str(error)}

    def _do(self, node: ForkedNode, what: str, seconds: float) -> int | bool:
        match what:
            case "pid":
                return node.pid
            case "kill":
                node.kill()
            case "freeze":
                node.freeze()
            case "resume":
                node.resume()
            case "wait":
                return node.has_ended(seconds)
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
    served = NodeHost(Forks())  # before there are threads
    try:
        with socket.create_server((host, int(port)), backlog=16) as listener:
            sys.stdout.write(f"Waiting at {host}:{listener.getsockname()[1]}\n")
            sys.stdout.flush()
            served.serve(listener)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how it ends
    finally:
        served.close()


if __name__ == "__main__":
    main()
