"""The connections that gloo has made, so that they can be cut.

A group over gloo cannot be taken apart while something in it waits for another rank: its destructor waits too, until
its patience is over, and in torch 2.13 ``abort()`` and ``shutdown()`` change nothing about that. What waits on a
connection that is cut fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

_OPEN_FILES: Final = "/proc/self/fd"


class Connections:
    """Sockets of this process, by descriptor, and what each of them is: a number may soon belong to another file."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}

    @contextlib.contextmanager
    def made_here(self) -> Iterator[None]:
        """What is opened within the block counts."""
        before = _sockets()
        yield
        self._made |= dict(_sockets().items() - before.items())

    def cut(self) -> None:
        """End those that are still open; the descriptors stay their owner's."""
        for number, _ in self._made.items() & _sockets().items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo aborts if its listener ends
                    one.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """The number of each within the kernel, by descriptor."""
    found = {}
    for name in os.listdir(_OPEN_FILES):
        with contextlib.suppress(OSError):  # closed meanwhile
            known = os.fstat(int(name))
            if stat.S_ISSOCK(known.st_mode):
                found[int(name)] = known.st_ino
    return found
