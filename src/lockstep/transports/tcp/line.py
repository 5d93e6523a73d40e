"""One connection: the calls of the C library that move bytes between registered memory and a socket.

They never wait. Large ones give up the interpreter's lock while the kernel copies; small ones keep it: they take
microseconds, and a thread that gives the lock up may have to queue for it behind one that computes in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
from typing import Any, Final

SMALL_BYTES: Final = 128 << 10
AGAIN: Final = -1
"""Instead of a number of bytes: nothing can move now."""

_WAKE_AT_LEAST: Final = 256 << 10
_WAKE_AT_MOST: Final = 1 << 20
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_IDLE_SECONDS, _BETWEEN_SECONDS, _PROBES = 30, 30, 20
"""Keepalive finds a host that vanished. The kernel of a frozen process answers it, so that one keeps its link."""


class _Piece(ctypes.Structure):
    """The C library's ``iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Message(ctypes.Structure):
    """The C library's ``msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint),
        ("pieces", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def _calls(library: Any) -> tuple[Any, Any]:
    for call in (library.sendmsg, library.recvmsg):
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        call.restype = ctypes.c_ssize_t
    return library.sendmsg, library.recvmsg


_SEND_SMALL, _RECEIVE_SMALL = _calls(ctypes.PyDLL(None, use_errno=True))
_SEND_LARGE, _RECEIVE_LARGE = _calls(ctypes.CDLL(None, use_errno=True))
_KNOCK: Final = ctypes.PyDLL(None, use_errno=True).eventfd_write
_KNOCK.argtypes = [ctypes.c_int, ctypes.c_uint64]


class _Two:
    """Up to two pieces of memory for one call."""

    def __init__(self) -> None:
        self._pieces = (_Piece * 2)()
        self._first, self._second = self._pieces
        self._message = _Message(pieces=ctypes.addressof(self._pieces))
        self._place = ctypes.addressof(self._message)

    def __call__(self, first: int, first_bytes: int, second: int, second_bytes: int) -> int:
        """The address of a message of these."""
        if not first_bytes:
            first, first_bytes, second_bytes = second, second_bytes, 0
        self._first.address, self._first.nbytes = first, first_bytes
        if second_bytes:
            self._second.address, self._second.nbytes = second, second_bytes
        self._message.count = 2 if second_bytes else 1
        return self._place


class Line:
    """A connection that has proven itself. One thread at a time sends, and one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, _IDLE_SECONDS),
            (socket.TCP_KEEPINTVL, _BETWEEN_SECONDS),
            (socket.TCP_KEEPCNT, _PROBES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self.descriptor = connection.fileno()
        self._out, self._in = _Two(), _Two()
        self._least = 1

    def send(self, first: int, first_bytes: int, second: int, second_bytes: int) -> int:
        """Send from two places in memory; how many bytes the kernel has taken, or ``AGAIN``. ``OSError``: broken."""
        call = _SEND_SMALL if first_bytes + second_bytes <= SMALL_BYTES else _SEND_LARGE
        return _moved(call(self.descriptor, self._out(first, first_bytes, second, second_bytes), _FLAGS))

    def receive(self, first: int, first_bytes: int, second: int, second_bytes: int) -> int:
        """Receive into two places in memory; how many bytes came, or ``AGAIN``. ``EOFError``: the peer hung up."""
        call = _RECEIVE_SMALL if first_bytes + second_bytes <= SMALL_BYTES else _RECEIVE_LARGE
        moved = _moved(call(self.descriptor, self._in(first, first_bytes, second, second_bytes), _FLAGS))
        if not moved:
            raise EOFError
        return moved

    def expect(self, nbytes: int) -> None:
        """Before waiting for so many bytes: let the kernel wake us for many at once, not for each packet."""
        least = 1 if nbytes < _WAKE_AT_LEAST else min(nbytes, _WAKE_AT_MOST)
        if least != self._least:
            self._least = least
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def end_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def _moved(result: int) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EINTR, errno.ENOBUFS):
        return AGAIN
    raise OSError(number, os.strerror(number))


class Bell:
    """Wakes the thread that polls its descriptor, without giving up the interpreter's lock."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def ring(self) -> None:
        with self._lock:  # the number of a closed descriptor may be reused by now
            if self._open:
                _KNOCK(self.descriptor, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.descriptor)
