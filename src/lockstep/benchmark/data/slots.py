"""Memory shared by the decoding processes and the training: a few slots, each for one batch of pixels and labels.

It has no name in the file system (memfd), so it cannot be left behind.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class SlotShape:
    """How the memory is divided. One number per process at its end says which sample that process is working on."""

    slots: int
    batch: int
    size: int
    processes: int

    @property
    def image_bytes(self) -> int:
        """Bytes for the pixels of one slot, in whole pages, so that they can be pinned and aligned."""
        return -(-self.batch * self.size * self.size * 3 // _PAGE) * _PAGE

    @property
    def label_bytes(self) -> int:
        return -(-self.batch * 8 // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        return self.slots * (self.image_bytes + self.label_bytes) + -(-self.processes * 8 // _PAGE) * _PAGE


class Slots:
    """The mapped memory, on either side."""

    def __init__(self, shape: SlotShape, descriptor: int | None = None) -> None:
        """Without a descriptor the memory is created; with one (in a decoding process) it is mapped."""
        self.shape = shape
        self._owned = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("lockstep-batches", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, shape.total_bytes)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, shape.total_bytes)
        images = shape.slots * shape.image_bytes
        labels = images + shape.slots * shape.label_bytes
        self.memory = np.frombuffer(self._map, np.uint8)
        self.progress: npt.NDArray[np.int64] = self.memory[labels : labels + shape.processes * 8].view(np.int64)
        self._images, self._labels = images, labels

    def images(self, slot: int) -> npt.NDArray[np.uint8]:
        """(batch, size, size, 3)."""
        shape = self.shape
        start = slot * shape.image_bytes
        flat = self.memory[start : start + shape.batch * shape.size * shape.size * 3]
        return flat.reshape(shape.batch, shape.size, shape.size, 3)

    def labels(self, slot: int) -> npt.NDArray[np.int64]:
        """(batch,)."""
        start = self._images + slot * self.shape.label_bytes
        return self.memory[start : start + self.shape.batch * 8].view(np.int64)

    def close(self) -> None:
        """Release the memory; views that are still held keep it alive."""
        if self._owned and self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        del self.memory, self.progress

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
