"""GPU memory that another process on this host can open, by a handle of the CUDA runtime that torch has loaded.

Everything here that is not torch's public interface is in this module. The memory is allocated for this purpose alone:
a handle opens the whole allocation that it is of, and torch's allocations hold other tensors as well (in expandable
segments they have no handle at all). A handle is 64 opaque bytes; nothing of a peer's is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lockstep.training.gpu.shared_events import gpu_of

HANDLE_BYTES: Final = 64
_OPEN_LAZILY: Final = 1
"""``cudaIpcMemLazyEnablePeerAccess``, the only way in which CUDA opens a handle."""


class CannotShareError(Exception):
    """GPU memory cannot be shared; the text says why, and everything travels through host memory."""


class GpuMemory(Protocol):
    """GPU memory of one process, and that of others which it has opened. ``CudaMemoryPool`` is the real one."""

    @property
    def gpu(self) -> bytes:
        """16 bytes that identify the GPU on this host."""

    @property
    def process(self) -> int:
        """The process that it belongs to, which cannot open its own handles."""

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed bytes that others may open; CannotShareError if that is not possible here."""

    def handle_of(self, memory: Tensor) -> bytes:
        """With these 64 bytes another process opens what ``allocate`` returned."""

    def free(self, memory: Tensor) -> None:
        """Nothing that is queued on the GPU uses what ``allocate`` returned any more."""

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        """The memory of another process; CannotShareError if it is not there, or smaller than this."""

    def close(self, memory: Tensor) -> None:
        """Nothing that is queued on the GPU uses what ``open`` returned any more."""


class _Handle(ctypes.Structure):
    """The C type ``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Runtime:
    """The functions of libcudart that torch does not offer. A result other than 0 is an error."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        except OSError as error:
            raise CannotShareError(f"the CUDA runtime was not found ({error})") from error
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._functions: dict[str, Any] = {}
        for name, arguments in (
            ("cudaMalloc", [ctypes.POINTER(address), size]),
            ("cudaFree", [address]),
            ("cudaIpcGetMemHandle", [ctypes.POINTER(_Handle), address]),
            ("cudaIpcOpenMemHandle", [ctypes.POINTER(address), _Handle, ctypes.c_uint]),
            ("cudaIpcCloseMemHandle", [address]),
        ):
            self._functions[name] = getattr(library, name)
            self._functions[name].argtypes = arguments
        library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library = library

    def call(self, name: str, *arguments: object) -> None:
        """CannotShareError with CUDA's own words if it fails."""
        result = self._functions[name](*arguments)
        if result:
            self._library.cudaGetLastError()  # or torch would blame it on whatever it launches next
            words = (self._library.cudaGetErrorString(result) or b"").decode(errors="replace")
            raise CannotShareError(f"{name}: {words or result}")


class _Bytes:
    """Device memory as torch takes it from others (``__cuda_array_interface__``), without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMemoryPool:
    """The memory of one task on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = _Runtime()
        self._gpu = gpu_of(device)

    @property
    def gpu(self) -> bytes:
        return self._gpu

    @property
    def process(self) -> int:
        return os.getpid()

    def allocate(self, nbytes: int) -> Tensor:
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            try:
                self._runtime.call("cudaMalloc", ctypes.byref(address), max(nbytes, 1))
            except CannotShareError:
                torch.cuda.empty_cache()  # torch keeps what it has freed
                self._runtime.call("cudaMalloc", ctypes.byref(address), max(nbytes, 1))
            memory = self._tensor(address, max(nbytes, 1)).zero_()
            torch.cuda.current_stream(self._device).synchronize()
        return memory

    def handle_of(self, memory: Tensor) -> bytes:
        handle = _Handle()
        with torch.cuda.device(self._device):
            self._runtime.call("cudaIpcGetMemHandle", ctypes.byref(handle), memory.data_ptr())
        return bytes(handle.reserved)

    def free(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device), contextlib.suppress(CannotShareError):
            self._runtime.call("cudaFree", memory.data_ptr())

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        if len(handle) != HANDLE_BYTES:
            raise CannotShareError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._runtime.call(
                "cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), _OPEN_LAZILY
            )
            try:
                _refuse_smaller(address, nbytes)
                return self._tensor(address, nbytes)
            except CannotShareError:
                self._runtime.call("cudaIpcCloseMemHandle", address)
                raise

    def close(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device), contextlib.suppress(CannotShareError):
            self._runtime.call("cudaIpcCloseMemHandle", memory.data_ptr())

    def _tensor(self, address: ctypes.c_void_p, nbytes: int) -> Tensor:
        made = torch.as_tensor(_Bytes(address.value or 0, nbytes), dtype=torch.uint8, device=self._device)
        if made.data_ptr() != address.value:
            raise CannotShareError("torch copies the memory of others")
        return made


def _refuse_smaller(address: ctypes.c_void_p, nbytes: int) -> None:
    """A peer says how large its memory is; the driver knows. To read beyond it would be the end of this process."""
    try:
        look_up = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    except (OSError, AttributeError) as error:
        raise CannotShareError(f"the CUDA driver does not tell how large memory is ({error})") from error
    first, size = ctypes.c_uint64(), ctypes.c_size_t()
    if result := look_up(ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(address.value or 0)):
        raise CannotShareError(f"the CUDA driver does not tell how large memory is (error {result})")
    there = first.value + size.value - (address.value or 0)
    if there < nbytes:
        raise CannotShareError(f"the peer's memory has {there} bytes, not {nbytes}")
