"""Host memory for regions: allocating and checking it, and the checks of a transfer that all transports share."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from lockstep.transports.base import Move, TransportError

MAX_NOTE_BYTES: Final = 4096
"""Longest note of a transfer, for every transport."""

SOURCE_NOT_OPEN: Final = "the source is not an open region of this transport: use its allocate or register first"

_GROUP_FILES: Final = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limit and use of this process's control group, as a container sees them (version 2, version 1)."""


def available_memory() -> int:
    """Bytes that this process can still allocate, on the machine or in its control group, whichever has less."""
    import psutil  # here, because it is not needed at startup

    available: int = psutil.virtual_memory().available
    for folder, limit_name, used_name in _GROUP_FILES:
        with suppress(OSError, ValueError):
            limit = int((folder / limit_name).read_text())
            used = int((folder / used_name).read_text()) - _cached((folder / "memory.stat").read_text())
            available = min(available, max(0, limit - used))
    return available


def _cached(statistics: str) -> int:
    """Bytes that the kernel counts as used and frees on demand."""
    return sum(int(line.split()[1]) for line in statistics.splitlines() if line.startswith("inactive_file "))


def check_room(nbytes: int, purpose: str) -> None:
    """Refuse memory of an impossible size, with numbers."""
    if nbytes < 0:
        raise TransportError(f"memory for {purpose} cannot have {nbytes} bytes")
    available = available_memory()
    if nbytes > available:
        raise TransportError(
            f"not enough memory for {purpose}: it needs {nbytes} bytes, this machine has {available} available; "
            "use a smaller model or a machine with more memory"
        )


def allocate_memory(nbytes: int, purpose: str) -> mmap.mmap:
    """Fresh zeroed memory, page-aligned, of at least one byte. Too little memory raises with numbers."""
    check_room(nbytes, purpose)
    try:
        return mmap.mmap(-1, max(nbytes, 1))
    except (OSError, OverflowError, ValueError) as error:
        raise TransportError(f"not enough memory for {purpose} of {nbytes} bytes: {error}") from error


def checked_buffer(buffer: memoryview) -> memoryview:
    """``buffer`` as plain bytes; refuses memory that a transport cannot move in one piece or write into."""
    if not buffer.c_contiguous:
        raise TransportError("this memory is not contiguous and cannot be registered: copy it into one piece first")
    if buffer.readonly:
        raise TransportError("this memory is read-only and cannot be registered: pass a writable buffer")
    return buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer


def address_of(buffer: memoryview) -> int:
    """Address of the first byte in this process; 0 for an empty buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer.nbytes else 0


def resident_bytes(buffer: memoryview) -> int:
    """How much of this memory is resident. Pages that were never touched cost nothing."""
    address, size = address_of(buffer), mmap.PAGESIZE
    first = address - address % size
    pages = -(-(address + buffer.nbytes - first) // size) if buffer.nbytes else 0
    seen = (ctypes.c_ubyte * pages)()
    if not pages or ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * size), seen) != 0:
        return 0
    return min(buffer.nbytes, sum(page & 1 for page in bytes(seen)) * size)


class HostRegion:
    """A region in ordinary memory of this process."""

    def __init__(
        self, number: int, buffer: memoryview, memory: mmap.mmap | None, on_close: Callable[[int], None]
    ) -> None:
        self.number = number
        self.closed = False
        self.device: int | None = None
        """The GPU that the memory is on; None: ordinary memory."""
        self._on_close = on_close
        self._buffer = buffer
        self._memory = memory
        self._address = address_of(buffer)

    def __repr__(self) -> str:
        return f"<HostRegion {self.number} of {self.nbytes} bytes{' (closed)' if self.closed else ''}>"

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    @property
    def address(self) -> int:
        return self._address

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._on_close(self.number)
        if self._memory is None:
            return
        # Any remaining view keeps the memory alive; it is freed with the last one.
        with suppress(BufferError):
            self._buffer.release()
            self._memory.close()
        self._buffer = memoryview(b"")


class GpuRegion(HostRegion):
    """A region in GPU memory, which only the GPU and a network device touch."""

    def __init__(self, number: int, address: int, nbytes: int, device: int, on_close: Callable[[int], None]) -> None:
        super().__init__(number, memoryview(b""), None, on_close)
        self.device = device
        self._address = address
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes


def check_move(transport: str, move: Move) -> HostRegion:
    """Refuse a move that cannot be right, before any of it is queued; otherwise return its source."""
    source, target = move.source, move.target
    if not isinstance(source, HostRegion) or source.closed:
        raise TransportError(SOURCE_NOT_OPEN)
    if target.transport != transport:
        raise TransportError(
            f"this ticket is for {target.transport}, not for {transport}: ask the peer for another one"
        )
    if move.offset < 0 or move.nbytes < 0 or move.offset + move.nbytes > source.nbytes:
        raise TransportError(
            f"bytes {move.offset} to {move.offset + move.nbytes} are outside the source region of {source.nbytes} bytes"
        )
    if move.target_offset < 0 or move.target_offset + move.nbytes > target.nbytes:
        raise TransportError(
            f"bytes {move.target_offset} to {move.target_offset + move.nbytes} are outside the target region "
            f"of {target.nbytes} bytes"
        )
    if len(move.note) > MAX_NOTE_BYTES:
        raise TransportError(f"a note of {len(move.note)} bytes is longer than the limit of {MAX_NOTE_BYTES}")
    return source
