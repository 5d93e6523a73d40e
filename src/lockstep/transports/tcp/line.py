"""One connection: the calls of the C library that move bytes between registered memory and a socket.

They never wait for the network. Large ones give up the interpreter's lock while the kernel copies; small ones keep it:
they take microseconds, and a thread that gives the lock up may have to queue for it behind one that computes in Python.
But the kernel lets only one call at a time have a connection: a small one beside a large one in the other direction
waits for it, and must not keep the lock, or the thread that has made the large one waits for the small one in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
import time
from typing import Any, Final

from lockstep.transports.tcp.spreading import HeldUp, held_up

SMALL_BYTES: Final = 128 << 10
AGAIN: Final = -1
"""Instead of a number of bytes: nothing can move now."""

SOON_NANOSECONDS: Final = 2_000_000
_WAKE_AT_LEAST: Final = 256 << 10
_WAKE_AT_MOST: Final = 64 << 10
"""More saves wake-ups, but then the receiver sleeps while the sender's processor does the work of both."""
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_IDLE_SECONDS, _BETWEEN_SECONDS, _PROBES = 30, 30, 20
"""Keepalive finds a host that vanished. The kernel of a frozen process answers it, so that one keeps its link."""


_TWO: Final = struct.Struct("@PNPN")
_THREE: Final = struct.Struct("@PNPNPN")
"""Two or three of the C library's ``iovec``: addresses and lengths."""


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


def _calls(library: Any) -> tuple[Any, Any, Any]:
    for call in (library.sendmsg, library.recvmsg):
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        call.restype = ctypes.c_ssize_t
    library.recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.recv.restype = ctypes.c_ssize_t
    return library.sendmsg, library.recv, library.recvmsg


_SEND_SMALL, _RECEIVE_SMALL, _SCATTER_SMALL = _calls(ctypes.PyDLL(None, use_errno=True))
_SEND_LARGE, _RECEIVE_LARGE, _SCATTER_LARGE = _calls(ctypes.CDLL(None, use_errno=True))
_LIBRARY: Final = ctypes.PyDLL(None, use_errno=True)
_KNOCK, _SET_TIMER = _LIBRARY.eventfd_write, _LIBRARY.timerfd_settime
_KNOCK.argtypes = [ctypes.c_int, ctypes.c_uint64]
_SET_TIMER.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class _Pieces:
    """Two or three pieces of memory for one call."""

    def __init__(self, count: int) -> None:
        self._pieces = bytearray(_THREE.size)
        self._message = _Message(pieces=ctypes.addressof(ctypes.c_char.from_buffer(self._pieces)), count=count)
        self._place = ctypes.addressof(self._message)

    def two(self, first: int, first_bytes: int, second: int, second_bytes: int) -> int:
        """The address of a message of these, whose lengths may be 0."""
        _TWO.pack_into(self._pieces, 0, first, first_bytes, second, second_bytes)
        return self._place

    def three(self, first: tuple[int, int], second: int, second_bytes: int, third: tuple[int, int]) -> int:
        _THREE.pack_into(self._pieces, 0, *first, second, second_bytes, *third)
        return self._place


class Line:
    """A connection that has proven itself. One thread at a time sends, and one receives."""

    is_private = False

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
        self._out, self._in = _Pieces(2), _Pieces(3)
        self._sends = self._receives = False  # whether a large call has the connection
        self._least = 1

    def send(self, first: int, first_bytes: int, second: int, second_bytes: int) -> int:
        """Send from two places in memory; how many bytes the kernel has taken, or ``AGAIN``. ``OSError``: broken."""
        message = self._out.two(first, first_bytes, second, second_bytes)
        moved: int
        if second_bytes <= SMALL_BYTES and not self._receives:
            moved = _SEND_SMALL(self.descriptor, message, _FLAGS)
        else:
            self._sends = True
            moved = _SEND_LARGE(self.descriptor, message, _FLAGS)
            self._sends = False
        return moved if moved >= 0 else _not_moved()

    def receive(self, address: int, nbytes: int) -> int:
        """Receive into memory; how many bytes came, or ``AGAIN``. ``EOFError``: the peer hung up."""
        call = _RECEIVE_SMALL if nbytes <= SMALL_BYTES and not self._sends else _RECEIVE_LARGE
        came: int = call(self.descriptor, address, nbytes, _FLAGS)
        return came if came > 0 else _not_come(came)

    def scatter(self, note: tuple[int, int], address: int, nbytes: int, beyond: tuple[int, int]) -> int:
        """The same into three places one after the other: before, in, and after this memory."""
        message = self._in.three(note, address, nbytes, beyond)
        came: int
        if nbytes <= SMALL_BYTES and not self._sends:
            came = _SCATTER_SMALL(self.descriptor, message, _FLAGS)
        else:
            self._receives = True
            came = _SCATTER_LARGE(self.descriptor, message, _FLAGS)
            self._receives = False
        return came if came > 0 else _not_come(came)

    def expect(self, nbytes: int) -> None:
        """Before waiting for so many bytes: let the kernel wake us for many at once, not for each packet."""
        least = 1 if nbytes < _WAKE_AT_LEAST else min(nbytes, _WAKE_AT_MOST)
        if least != self._least:
            self._least = least
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def held_up(self) -> HeldUp | None:
        """What has held up the sending over this connection so far."""
        return held_up(self._socket)

    def end_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def _not_come(result: int) -> int:
    if not result:
        raise EOFError
    return _not_moved()


def _not_moved() -> int:
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EINTR, errno.ENOBUFS):
        return AGAIN
    raise OSError(number, os.strerror(number))


class Bell:
    """Wakes the thread that polls its descriptors, without giving up the interpreter's lock."""

    def __init__(self) -> None:
        self._at_once = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._soon = _LIBRARY.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._soon < 0:
            os.close(self._at_once)
            raise OSError(ctypes.get_errno(), "no timer")
        self.descriptors = (self._at_once, self._soon)
        self._delay = (ctypes.c_long * 4)(0, 0, 0, SOON_NANOSECONDS)
        self._lock = threading.Lock()
        self._set = False
        self._open = True

    def ring(self) -> None:
        with self._lock:  # the number of a closed descriptor may be reused by now
            if self._open:
                _KNOCK(self._at_once, 1)

    def ring_soon(self) -> None:
        """For what can wait a moment: mostly the thread wakes before for another reason.

        A timer that is set stays set, even if nothing is left to do: to set it takes as long as sending 64 KiB, where
        a hypervisor has to be asked."""
        if self._set:
            return
        with self._lock:
            if self._open:
                self._set = True
                _SET_TIMER(self._soon, 0, ctypes.addressof(self._delay), None)

    def hush(self, descriptor: int) -> None:
        """It has rung."""
        if descriptor == self._soon:
            self._set = False
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, 8)

    def close(self) -> None:
        with self._lock:
            self._open = False
            for descriptor in self.descriptors:
                os.close(descriptor)
