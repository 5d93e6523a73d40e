"""Host memory that the GPU's copy engines can access directly.

The memory is the transport's: regions of this task, and those of a peer on this host that are mapped here read-only.
Registering it with CUDA keeps its pages in place; only then do copies overlap with the computation. If it cannot be
registered, copies still work, at the speed of a copy by the CPU.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.training.tensors import as_tensor

_READ_ONLY = 8
"""``cudaHostRegisterReadOnly``: for memory that this process may only read."""


class PinnedMemory:
    """The memory that one task has registered. ``close`` unregisters all of it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], Tensor | None] = {}
        """By address and size; the tensor keeps the memory alive while it is registered. None: registering failed."""
        self._objects: set[int] = set()
        """Owners of registered memory, kept as long as it is registered, so that no other object gets their id."""

    def pin(self, buffer: memoryview) -> bool:
        """Register all of the memory that this is a part of, once; returns whether it is registered."""
        whole = _whole(buffer)
        key = _key(whole)
        with self._lock:
            if key not in self._known:
                self._known[key] = whole if _register(whole, read_only=buffer.readonly) else None
            if self._known[key] is not None:
                self._objects.add(id(buffer.obj))
            return self._known[key] is not None

    def is_pinned(self, buffer: memoryview) -> bool:
        """Whether ``pin`` has registered this memory; never waits."""
        return id(buffer.obj) in self._objects

    def keep_only(self, buffers: Sequence[memoryview]) -> None:
        """Unregister all memory except that of these buffers; no copy of it may be in progress."""
        kept = {_key(_whole(buffer)) for buffer in buffers}
        with self._lock:
            for key in [key for key in self._known if key not in kept]:
                whole = self._known.pop(key)
                if whole is not None:
                    torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())
            self._objects.intersection_update([id(buffer.obj) for buffer in buffers])

    def close(self) -> None:
        """Unregister everything; no copy may be in progress."""
        self.keep_only([])


def pins_read_only() -> bool:
    """Whether read-only memory can be registered here; tried with one page."""
    page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    pinned = PinnedMemory()
    try:
        return pinned.pin(memoryview(page))
    finally:
        pinned.close()


def _whole(buffer: memoryview) -> Tensor:
    return as_tensor(memoryview(buffer.obj).cast("B"), torch.uint8)


def _key(whole: Tensor) -> tuple[int, int]:
    return whole.data_ptr(), whole.numel()


def _register(whole: Tensor, *, read_only: bool) -> bool:
    if not whole.numel():
        return False
    result = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), _READ_ONLY if read_only else 0)
    if int(result) == 0:
        return True
    forget_error()
    return False


def forget_error() -> None:
    """Clear CUDA's error, which torch would otherwise blame on whatever it launches next."""
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    runtime.cudaGetLastError()
