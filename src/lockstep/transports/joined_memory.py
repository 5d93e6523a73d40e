"""Pages of several shared mappings, mapped a second time, side by side: one contiguous range without a copy.

A parameter that is split across several servers lies in pieces in their memory. If the pieces are whole pages, the
kernel can map them one after another (``mremap`` with an old size of 0 maps shared pages again).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

_NO_ACCESS: Final = 0
_FAILED: Final = ctypes.c_void_p(-1).value
_MAY_MOVE_TO_FIXED: Final = 1 | 2


def join_pages(parts: Sequence[tuple[int, int]]) -> memoryview | None:
    """The ranges ``(address, nbytes)`` one after another, read-only; None if that is not possible.

    All must be shared mappings of this process. Every range must begin at a page, and all but the last must end
    with one. The memory is freed with the last view of it, even if the original mapping is gone.
    """
    if not parts or any(address % mmap.PAGESIZE for address, _ in parts):
        return None
    if any(nbytes % mmap.PAGESIZE for _, nbytes in parts[:-1]):
        return None
    total = sum(nbytes for _, nbytes in parts)
    room = _whole_pages(total)
    libc = _libc()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, room, _NO_ACCESS, flags, -1, 0)
    if base in (None, _FAILED):
        return None
    where = int(base)
    for address, nbytes in parts:
        if libc.mremap(address, 0, _whole_pages(nbytes), _MAY_MOVE_TO_FIXED, where) != where:
            libc.munmap(base, room)
            return None
        where += nbytes
    # A separate class, because plain ctypes arrays cannot be weakly referenced.
    kind: Any = type("JoinedPages", (ctypes.c_ubyte * total,), {})
    pages = kind.from_address(int(base))
    # Not at exit: other threads may still be reading, and the mappings end with the process.
    weakref.finalize(pages, libc.munmap, base, room).atexit = False
    joined = np.frombuffer(pages, np.uint8)
    joined.flags.writeable = False
    return joined.data


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    number, place, length = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype, libc.mmap.argtypes = place, [place, length, number, number, number, ctypes.c_long]
    libc.mremap.restype, libc.mremap.argtypes = place, [place, length, length, number, place]
    libc.munmap.restype, libc.munmap.argtypes = number, [place, length]
    return libc
