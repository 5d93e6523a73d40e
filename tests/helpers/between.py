"""Somebody between all tasks of a job: every connection passes here, is written down, and may be changed.

The tasks are listed at one address of this host and bind another one, with the same ports, as behind port forwarding;
what listens at the listed address is ours.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from helpers.adversary import until_quiet
from lockstep.security.proof import OPENING_BYTES

SHOWN, HIDDEN = "127.0.0.2", "127.0.0.1"
TLS = b"\x16"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAGIC = b"lockstep proof 1"
_HEAD = 9
_DATA = 0
_KEPT_BYTES = 1 << 16


class Treatment(Enum):
    """What happens to a connection."""

    IMPOSTOR = auto()
    """It is answered with the certificate of another key, where TLS is spoken; else as the next."""
    ALTER_DIALER = auto()
    ALTER_ACCEPTOR = auto()
    RELAY = auto()


@dataclass
class Passage:
    """One connection: who dialed which port, and what the dialer said first."""

    port: int
    treatment: Treatment
    said: bytearray = field(default_factory=bytearray)
    heard: bytearray = field(default_factory=bytearray)
    posed: bool = False
    """Whether the dialer shook hands with us; then ``said`` is what it said inside of TLS."""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_plain(self) -> bool:
        """Whether two ends proved themselves here in plain HTTP/2 or on a bare connection; at a port with TLS nobody
        answers that."""
        return (self.said.startswith(_PREFACE) or _is_proof(self.said)) and bool(self.heard)

    def replay(self) -> bytes:
        """Say to the same port what a member said there before; what it answers."""
        with socket.create_connection((HIDDEN, self.port), 5) as line:
            with suppress(OSError):
                line.sendall(self.said)
            return until_quiet(line)


class Flip:
    """Changes one bit: of the first record in TLS, of the first message of a stream in plain HTTP/2, or of a proof."""

    def __init__(self) -> None:
        self._held = b""
        self._done = False

    def __call__(self, part: bytes) -> bytes:
        if self._done:
            return part
        self._held += part
        if self._held[:1] == TLS:
            self._done = True
            return _flipped(self._held)
        if _is_proof(self._held):
            self._done = True
            end = 4 + int.from_bytes(self._held[:4], "little")
            return _flipped(self._held[:end]) + self._held[end:]
        passed, at = b"", len(_PREFACE) if self._held.startswith(_PREFACE) else 0
        while not self._done and len(self._held) >= at + _HEAD:
            end = at + _HEAD + int.from_bytes(self._held[at : at + 3], "big")
            if len(self._held) < end:
                break
            self._done = self._held[at + 3] == _DATA and end > at + _HEAD
            passed += _flipped(self._held[:end]) if self._done else self._held[:end]
            self._held, at = self._held[end:], 0
        if self._done:
            passed, self._held = passed + self._held, b""
        return passed


def _is_proof(said: bytes | bytearray) -> bool:
    """Whether it begins as a dialer, or as an acceptor, of a connection of its own (``security/wire.py``)."""
    return said[8:24] == _MAGIC or (said[:4] == struct.pack("<I", 1 + OPENING_BYTES) and said[4:5] == b"O")


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


Treat = Callable[[int], Treatment]


class Between:
    """Listens at ``SHOWN`` for what listens at ``HIDDEN``; ``treat`` gets the number of a connection at its port."""

    def __init__(self, ports: Iterable[int], treat: Treat, impostor: ssl.SSLContext) -> None:
        self.passages: list[Passage] = []
        self._treat = treat
        self._impostor = impostor
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listeners = [socket.create_server((SHOWN, port)) for port in ports]
        for listener in self._listeners:
            self._start(self._accept, listener)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, name="between", daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        port = listener.getsockname()[1]
        number = 0
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((HIDDEN, port), 5)
            except OSError:  # nothing listens there yet
                near.close()
                continue
            far.settimeout(None)
            passage = Passage(port, self._treat(number))
            number += 1
            with self._lock:
                self.passages.append(passage)
                self._open.update((near, far))
            self._start(self._pass, passage, near, far)

    def _pass(self, passage: Passage, near: socket.socket, far: socket.socket) -> None:
        begins = b""
        with suppress(OSError):
            begins = near.recv(1, socket.MSG_PEEK)
        if passage.treatment is Treatment.IMPOSTOR and begins == TLS:
            passage.posed = True
            self._pose(passage, near)
            _cut(far)
        else:
            altering = passage.treatment in (Treatment.IMPOSTOR, Treatment.ALTER_DIALER)
            self._start(self._pump, far, near, passage.heard, passage.treatment is Treatment.ALTER_ACCEPTOR)
            self._pump(near, far, passage.said, altering)
        passage.over.set()

    def _pose(self, passage: Passage, near: socket.socket) -> None:
        """In the place of the acceptor: what the dialer says to somebody with another key."""
        with suppress(OSError):
            near.settimeout(5)
            with self._impostor.wrap_socket(near, server_side=True) as shaken:
                while part := shaken.recv(65536):
                    passage.said += part
        _cut(near)

    def _pump(self, source: socket.socket, target: socket.socket, kept: bytearray, altering: bool) -> None:
        change = Flip() if altering else None
        with suppress(OSError):
            while part := source.recv(1 << 18):
                if len(kept) < _KEPT_BYTES:
                    kept += part[: _KEPT_BYTES - len(kept)]
                target.sendall(part if change is None else change(part))
        for end in (source, target):
            _cut(end)

    def close(self) -> None:
        for listener in self._listeners:
            _cut(listener)
        with self._lock:
            ends, threads = list(self._open), list(self._threads)
        for end in ends:
            _cut(end)
        for thread in threads:
            thread.join(10)
        for end in (*ends, *self._listeners):
            end.close()


def _cut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
