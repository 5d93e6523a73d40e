"""Ports that no process uses or gets by chance.

They are below those that the system gives to outgoing connections (32768 and above on Linux), and processes that run
tests in parallel take theirs from different parts: some time passes until a task listens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time

FIRST, PARTS, PART = 12000, 16, 1250
_beside = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
_begin = FIRST + int(_beside or os.getpid()) % PARTS * PART
_places = itertools.count(time.time_ns() % PART)


def free_port() -> int:
    """A TCP port that no process listens on, at whatever address."""
    for _ in range(PART):
        port = _begin + next(_places) % PART
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"all ports from {_begin} to {_begin + PART} are taken")


def free_ports(count: int) -> list[int]:
    """Several free ports, all different."""
    return [free_port() for _ in range(count)]


def free_range(count: int) -> tuple[int, int]:
    """First and last of as many ports in a row that no process listens on; none of them is handed out again soon."""
    while True:
        first = free_port()
        row = range(first, first + count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in row:
                probe = held.enter_context(socket.socket())
                probe.bind(("", port))
            for _ in row[1:]:
                next(_places)
            return row[0], row[-1]
