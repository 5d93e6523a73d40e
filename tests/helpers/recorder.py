"""Somebody between two tasks who writes down, and may change, what passes on the connections of ``grpc+tcp``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Change = Callable[[bytes], bytes]


class Recorder:
    """Listens in the place of ``address``; ``said`` and ``heard`` are what dialers and acceptors have sent."""

    def __init__(self, host: str, port: int) -> None:
        self._there = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.said, self.heard = bytearray(), bytearray()
        self.change: Change = bytes
        """What becomes of what a dialer says."""
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, name="recorder", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._there)
                self._open += (near, far)
                self._start(self._pump, far, near, self.heard, bytes)
                self._start(self._pump, near, far, self.said, lambda part: self.change(part))

    def _pump(self, source: socket.socket, target: socket.socket, kept: bytearray, change: Change) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 18):
                kept += part
                target.sendall(change(part))
        _cut(target)

    def close(self) -> None:
        for end in (self._listener, *self._open):
            _cut(end)
        for thread in self._threads:
            thread.join(10)
        for end in (self._listener, *self._open):
            end.close()


def _cut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
