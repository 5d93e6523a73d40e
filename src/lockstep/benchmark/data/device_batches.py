"""Batches as tensors on a device: the only module of the input that uses torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.benchmark.data.pipeline import Batches, HostBatch

_HALF_RANGE = 127.5
MLPERF_MEANS = (123.68, 116.78, 103.94)


class DeviceBatches:
    """Turns pixels into a model's input: floats between -1 and 1, or with the channel means subtracted (``--ml_perf``).

    For a GPU the batches' memory is pinned, and pixels are copied as bytes and become floats there.
    """

    def __init__(
        self,
        batches: Batches,
        device: torch.device,
        memory_format: torch.memory_format,
        *,
        subtract_means: bool = False,
    ) -> None:
        self.batches = batches
        self._device = device
        self._format = memory_format
        self._means = torch.tensor(MLPERF_MEANS, device=device).view(1, 3, 1, 1) if subtract_means else None
        self._pinned = self._pin()
        self._copied: torch.cuda.Event | None = None

    def next(self) -> tuple[Tensor, Tensor]:
        """Images (n, 3, size, size) and labels (n,) of the next step."""
        if self._copied is not None:
            # The pipeline reuses the previous batch's memory; its copy was started a whole step ago.
            self._copied.synchronize()
        batch = self.batches.next()
        pixels, labels = self._on_device(batch)
        images = pixels.permute(0, 3, 1, 2).to(torch.float32).contiguous(memory_format=self._format)
        return (images.div_(_HALF_RANGE).sub_(1.0) if self._means is None else images.sub_(self._means)), labels

    def _on_device(self, batch: HostBatch) -> tuple[Tensor, Tensor]:
        pixels, labels = torch.from_numpy(batch.images), torch.from_numpy(batch.labels)
        if self._device.type != "cuda":
            return pixels, labels.clone()
        moved = pixels.to(self._device, non_blocking=self._pinned), labels.to(self._device, non_blocking=self._pinned)
        if self._pinned:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))
        return moved

    def _pin(self) -> bool:
        memory = self.batches.memory
        if self._device.type != "cuda" or memory is None:
            return False
        return int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0

    def close(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self._device)
            memory = self.batches.memory
            assert memory is not None
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
            self._pinned = False
        self.batches.close()
