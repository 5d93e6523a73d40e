"""Which end decides the fate of a transfer: one token per transfer, in memory that both ends map.

The receiver takes a transfer's token when all bytes are in place, and only then reports the arrival; the sender takes
it to give the transfer up. The end that comes first has decided, even if the other is frozen or dead by then. A token
is a semaphore with a count of one, since ``sem_trywait`` is an atomic decision between processes that Python can call.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

from lockstep.transports.shm.memory import make_memory_file, map_file

TOKENS: Final = 1024
"""Transfers of one endpoint that the peer may know at the same time; further ones wait at the sender."""

_STRIDE: Final = 64
_BYTES: Final = TOKENS * _STRIDE


def _library() -> Any:
    """The C library. These calls never block, so they keep the interpreter's lock."""
    return ctypes.PyDLL(None)


class Tokens:
    """The tokens of one direction of a link."""

    def __init__(self, descriptor: int) -> None:
        self._memory = map_file(descriptor, _BYTES, writable=True)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        library = _library()
        self._init, self._try = library.sem_init, library.sem_trywait
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._try.argtypes = [ctypes.c_void_p]

    def lay_out(self, number: int) -> None:
        """Sender: a new transfer uses this token."""
        self._init(self._address + number * _STRIDE, 1, 1)

    def take(self, number: int) -> bool:
        """Either end: whether this call has decided about the transfer."""
        return self._address != 0 and bool(self._try(self._address + number * _STRIDE) == 0)

    def close(self) -> None:
        """Unmap the memory; not while another thread may use a token."""
        self._address = 0
        self._memory.close()


def make_tokens() -> tuple[int, Tokens]:
    """A new sheet of tokens, and the descriptor to send to the peer (the caller closes it)."""
    descriptor = make_memory_file(_BYTES, "the signals of a link")
    try:
        return descriptor, Tokens(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
