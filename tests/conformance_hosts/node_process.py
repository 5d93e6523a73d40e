"""The process of one remote node; run by ``RemoteNode`` with transport, task, incarnation and address as arguments.

It ends when its standard input does, so it never outlives the suite.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, TextIO

from conformance_hosts.remote import pack, unpack
from lockstep.security.chosen import chosen_key
from lockstep.transports.base import TransportError
from lockstep.transports.conformance.events import EventLog, Heard
from lockstep.transports.conformance.node import LocalNode


class _Lines:
    """Standard output, one JSON object per line, from several threads."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def write(self, content: dict[str, Any]) -> None:
        with self._lock:
            self._out.write(json.dumps(content) + "\n")
            self._out.flush()


class _TellingLog(EventLog):
    """The event log of the process's own node: sends everything to the suite."""

    def __init__(self, name: str, out: _Lines) -> None:
        super().__init__(name)
        self._out = out

    def add(self, heard: Heard) -> None:
        self._out.write({"heard": pack(heard)})


def _carry_out(node: LocalNode, line: str) -> dict[str, Any]:
    content = json.loads(line)
    try:
        result = getattr(node, content["call"])(*[unpack(argument) for argument in content["arguments"]])
    except TransportError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"result": pack(result)}


def main() -> None:
    transport, task, incarnation, *host = sys.argv[1:]
    out = _Lines(sys.stdout)
    node = LocalNode(transport, task, int(incarnation), *host, key=chosen_key())
    node.log = _TellingLog(task, out)
    for line in sys.stdin:
        out.write(_carry_out(node, line))
    node.close()


if __name__ == "__main__":
    main()
