"""GPU memory for tests without a GPU: host memory with handles that "processes" of this test open."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.training.gpu.ipc_memory import HANDLE_BYTES, CannotShareError


class FakeGpu:
    """One GPU: what was allocated on it, by handle."""

    def __init__(self, uuid: bytes = b"G" * 16) -> None:
        self.uuid = uuid
        self.memory: dict[bytes, Tensor] = {}
        self.numbers: Iterator[int] = itertools.count(1)


class FakeGpuMemory:
    """The memory of one process on it."""

    def __init__(self, gpu: FakeGpu, process: int = 1) -> None:
        self._there = gpu
        self.process = process
        self.fails = ""
        """If given, what CUDA says to everything from now on."""
        self.lacks_memory = False
        self.own: list[Tensor] = []
        self.opened: list[Tensor] = []

    @property
    def gpu(self) -> bytes:
        return self._there.uuid

    def allocate(self, nbytes: int) -> Tensor:
        self._try()
        if self.lacks_memory:
            raise CannotShareError("out of memory")
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.own.append(memory)
        self._there.memory[next(self._there.numbers).to_bytes(HANDLE_BYTES, "big")] = memory
        return memory

    def handle_of(self, memory: Tensor) -> bytes:
        self._try()
        return next(handle for handle, known in self._there.memory.items() if known is memory)

    def free(self, memory: Tensor) -> None:
        self.own = [known for known in self.own if known is not memory]
        self._there.memory = {handle: known for handle, known in self._there.memory.items() if known is not memory}

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        self._try()
        whole = self._there.memory.get(handle)
        if whole is None or whole.numel() < nbytes:
            raise CannotShareError("invalid resource handle")
        opened = whole[:nbytes]
        self.opened.append(opened)
        return opened

    def close(self, memory: Tensor) -> None:
        self.opened = [known for known in self.opened if known is not memory]

    def _try(self) -> None:
        if self.fails:
            raise CannotShareError(self.fails)
