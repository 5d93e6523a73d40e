"""The signal socket of a link: small ordered frames between two processes on one host, with descriptors where needed.

Sending never blocks: frames that the kernel does not take yet wait here. One thread receives; it sleeps in ``poll``
until a frame, room to send, or a wake-up comes, and never spins.

A step sends several frames per bucket. The two calls that each of them takes go to the C library and keep the
interpreter's lock: they return at once, and a thread that releases the lock may have to queue for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from lockstep.transports.shm.frames import MAX_FRAME_BYTES

_BATCH: Final = 64
_MAX_DESCRIPTORS: Final = 4
_RECEIVING: Final = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC

Frame = tuple[bytes, list[int]]
"""A frame and the descriptors that came with it; the receiver closes them."""


class _Polled(ctypes.Structure):
    """The C library's ``pollfd``."""

    _fields_ = (("descriptor", ctypes.c_int), ("asked", ctypes.c_short), ("happened", ctypes.c_short))


def _library() -> Any:
    """The C library, called with the interpreter's lock held."""
    library = ctypes.PyDLL(None, use_errno=True)
    library.send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    library.send.restype = ctypes.c_ssize_t
    library.poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
    return library


class Signals:
    """One end of a connected signal socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._backlog: deque[Frame] = deque()
        self._closed = False
        library = _library()
        self._send, self._poll = library.send, library.poll
        self._end = _Polled(connection.fileno(), 0, 0)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a frame after those before it; does nothing on a broken socket, which the receiver notices."""
        with self._lock:
            if self._closed:
                return
            if not self._backlog and self._send_now(frame, descriptors):
                return
            self._backlog.append((frame, [os.dup(descriptor) for descriptor in descriptors]))
        self.wake()

    def _send_now(self, frame: bytes, descriptors: Sequence[int]) -> bool:
        if not descriptors:
            sent = self._send(self._socket.fileno(), frame, len(frame), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            return sent >= 0 or ctypes.get_errno() != errno.EAGAIN
        try:
            socket.send_fds(self._socket, [frame], list(descriptors), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def wake(self) -> None:
        """Let ``receive`` return."""
        with self._lock:  # the number of a closed descriptor may be reused by now
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def receive(self) -> list[Frame]:
        """Wait for frames, or for a wake-up (then there may be none). EOFError if the peer is gone."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._backlog else 0))
        for descriptor, happened in poller.poll():
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif happened & select.POLLOUT:
                self._flush()
        return self._receive_batch()

    def receive_within(self, seconds: float, descriptors: int = _MAX_DESCRIPTORS) -> Frame | None:
        """One frame of the handshake; None if none comes in time or the socket is woken. ``descriptors``: how many
        may come with it; the kernel drops others before they are open here."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._socket, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(seconds * 1000)}
        if self._socket.fileno() not in ready:
            return None
        return self._receive_one(descriptors)

    def peer_is_gone(self) -> bool:
        """Whether the other end has closed the socket, even if some of its frames are still unread."""
        return bool(self._poll(ctypes.byref(self._end), 1, 0) > 0)

    def _flush(self) -> None:
        with self._lock:
            while self._backlog and self._send_now(*self._backlog[0]):
                _close_all(self._backlog.popleft()[1])

    def _receive_batch(self) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < _BATCH:
            try:
                frame = self._receive_one()
            except EOFError:
                if frames:
                    break  # the next call sees the end again
                raise
            if frame is None:
                break
            frames.append(frame)
        return frames

    def _receive_one(self, most: int = _MAX_DESCRIPTORS) -> Frame | None:
        for _ in range(2):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_FRAME_BYTES, most, _RECEIVING)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the peer closed without reading everything; what it sent before is still there
            except OSError as error:
                raise EOFError(str(error)) from error
            if data:
                return data, list(descriptors)
            _close_all(descriptors)  # a frame without bytes may bring some
            raise EOFError("the socket was closed")
        raise EOFError("the connection was reset")

    def close(self) -> None:
        """Send what the kernel still accepts, and close."""
        self._flush()
        with self._lock:
            self._closed = True
            for _, descriptors in self._backlog:
                _close_all(descriptors)
            self._backlog.clear()
            self._socket.close()
            os.close(self._wake)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def close_descriptors(frame: Frame) -> None:
    """Close what came with a frame."""
    _close_all(frame[1])
