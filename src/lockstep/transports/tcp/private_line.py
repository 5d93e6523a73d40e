"""One connection in TLS, with the calls of a plain one.

What is encrypted takes one more step on each side of the kernel: a piece of a tensor is encrypted into memory and sent
from there, and what has come is decrypted straight into the region, as far as its records are whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, cast

from lockstep.security.tls import PrivateConnection
from lockstep.transports.memory import address_of
from lockstep.transports.tcp.line import AGAIN, Line

RECORD_BYTES: Final = 16 << 10
"""The most that TLS encrypts in one go."""
_PIECE_BYTES: Final = 256 << 10
"""Encrypted before the kernel gets it: little enough to stay in the cache."""
_MOST_BYTES: Final = 1 << 20
"""Of one call: encrypting takes much longer than what the kernel does."""
_COMING_BYTES: Final = 256 << 10
_READ, _WRITE = 0x100, 0x200

_MEMORY: Final[Any] = ctypes.pythonapi.PyMemoryView_FromMemory
_MEMORY.argtypes, _MEMORY.restype = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int], ctypes.py_object


class PrivateLine(Line):
    """A connection that has proven itself inside of TLS. One thread at a time sends, and one receives.

    ``send`` takes a piece when the kernel has all of it encrypted. Until then the same bytes must be given again, as
    whoever sends a frame to its end does.

    ``expect`` may ask the kernel to wake us for many bytes at once: encrypted they are more, and less than one record
    of them is here already.
    """

    is_private = True

    def __init__(self, private: PrivateConnection) -> None:
        super().__init__(private.socket)
        self._private = private
        self._joined = memoryview(bytearray(RECORD_BYTES))
        self._encrypted = b""
        self._unsent = 0
        self._held = 0  # bytes of the sender in what is encrypted
        self._coming = memoryview(bytearray(_COMING_BYTES))
        self._coming_address = address_of(self._coming)

    def send(self, first: int, first_bytes: int, second: int, second_bytes: int) -> int:
        moved, total = 0, first_bytes + second_bytes
        while moved < min(total, _MOST_BYTES):
            if not self._unsent:
                self._encrypt(first, first_bytes, second, second_bytes, moved)
            if not self._send_encrypted():
                break
            moved += self._held
        return moved or AGAIN

    def _encrypt(self, first: int, first_bytes: int, second: int, second_bytes: int, at: int) -> None:
        """The next piece, ``at`` so many bytes of both together; what is left of the first shares its record with the
        beginning of the second."""
        pieces, of_first = [], max(0, first_bytes - at)
        at_second = max(0, at - first_bytes)
        of_second = min(second_bytes - at_second, _PIECE_BYTES)
        if of_first:
            of_first = min(of_first, RECORD_BYTES)
            joined = min(of_second, RECORD_BYTES - of_first)
            ctypes.memmove(address_of(self._joined), first + at, of_first)
            if joined:
                ctypes.memmove(address_of(self._joined) + of_first, second, joined)
            pieces.append(self._joined[: of_first + joined])
            at_second += joined
            of_second = of_second - joined if at + of_first == first_bytes else 0
        if of_second:
            pieces.append(_MEMORY(second + at_second, of_second, _READ))
        self._encrypted = self._private.encrypt(*pieces)
        self._unsent = len(self._encrypted)
        self._held = sum(map(len, pieces))

    def _send_encrypted(self) -> bool:
        """Whether the kernel has all of it."""
        address = ctypes.cast(ctypes.c_char_p(self._encrypted), ctypes.c_void_p).value or 0
        while self._unsent:
            sent = super().send(0, 0, address + len(self._encrypted) - self._unsent, self._unsent)
            if sent == AGAIN:
                return False
            self._unsent -= sent
        return True

    def receive(self, address: int, nbytes: int) -> int:
        return self._decrypt(address, nbytes, super().receive) or AGAIN

    def scatter(self, note: tuple[int, int], address: int, nbytes: int, beyond: tuple[int, int]) -> int:
        came, receive = 0, super().receive
        for place, room in (note, (address, nbytes), beyond):
            if room:
                got = self._decrypt(place, room, receive if not came else None)
                came += got
                if got < room:
                    break
        return came or AGAIN

    def _decrypt(self, address: int, nbytes: int, receive: Callable[[int, int], int] | None) -> int:
        """How many bytes are in place. With none, nothing more is whole: the next will come through the kernel.
        ``receive``: take more from the kernel if there are none here."""
        into = cast(memoryview, _MEMORY(address, nbytes, _WRITE))
        came = self._private.decrypt(into)
        while not came and receive is not None:
            taken = receive(self._coming_address, min(nbytes + RECORD_BYTES, _COMING_BYTES))
            if taken == AGAIN:
                break
            self._private.feed(self._coming[:taken])
            came = self._private.decrypt(into)
        return came
