"""Regions in shared memory, and the mappings of a peer's regions.

A region is a sealed memory file (``memfd``): it has no name, so nothing is left behind however a process ends. Its
pages are allocated when it is made, and its size is sealed, so a later access can neither run out of memory nor past
its end. ``/dev/shm`` and its size play no part.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final

import numpy as np

from lockstep.transports.base import TransportError
from lockstep.transports.memory import HostRegion, check_room

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory_file(nbytes: int, purpose: str) -> int:
    """A descriptor of ``nbytes`` zeroed, allocated bytes; too little memory raises with numbers."""
    check_room(nbytes, purpose)
    descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise TransportError(f"not enough shared memory for {purpose} of {nbytes} bytes: {error.strerror}") from error
    return descriptor


def map_file(descriptor: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """Map a memory file of this host; ``TransportError`` if the descriptor is something else."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransportError("the peer offered memory that could shrink while it is read; this is refused")
        if os.fstat(descriptor).st_size < nbytes:
            raise TransportError(f"the peer announced {nbytes} bytes, but there are fewer")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, max(nbytes, 1), mmap.MAP_SHARED, protection)
    except (OSError, ValueError) as error:
        raise TransportError(f"shared memory of {nbytes} bytes could not be mapped: {error}") from error


def address_of_mapping(mapping: mmap.mmap) -> int:
    """Address of the first byte; numpy gives it even for read-only memory."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


class SharedRegion(HostRegion):
    """A region that peers on this host can map."""

    def __init__(self, number: int, nbytes: int, purpose: str, on_close: Callable[[int], None]) -> None:
        self.descriptor = make_memory_file(nbytes, purpose)
        memory = mmap.mmap(self.descriptor, max(nbytes, 1))
        super().__init__(number, memoryview(memory)[:nbytes], memory, on_close)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self.descriptor)


class PeerRegion:
    """A region of the peer, mapped read-only."""

    def __init__(self, nbytes: int, descriptor: int) -> None:
        self.nbytes = nbytes
        self._mapping = map_file(descriptor, nbytes, writable=False)
        self.address = address_of_mapping(self._mapping)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A range of it; the view keeps the mapping alive, even after the link has ended."""
        return memoryview(self._mapping)[offset : offset + nbytes]
