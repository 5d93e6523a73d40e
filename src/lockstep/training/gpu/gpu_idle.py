"""How long a worker's GPU is idle between two steps, by the GPU's own clock."""

from __future__ import annotations

import statistics
from collections import deque

import torch

_KEPT = 1000


class GpuIdle:
    """Marks on the computation's stream: after backward, and when the next parameters have arrived.

    The marks are read a few steps later, when the GPU has long passed them, so nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: torch.cuda.Event | None = None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def begins(self) -> None:
        """All of the step's computation is queued."""
        self._take()
        self._began = self._mark()

    def ends(self) -> None:
        """What follows on the stream computes with the next parameters."""
        if self._began is not None:
            self._open.append((self._began, self._mark()))
            self._began = None

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _take(self) -> None:
        while self._open and self._open[0][1].query():
            first, second = self._open.popleft()
            self._seconds.append(first.elapsed_time(second) / 1000)

    def usual(self) -> float | None:
        """Seconds per step, the median of the last steps; None if there are none. Waits for the GPU."""
        torch.cuda.synchronize(self._device)
        self._take()
        return statistics.median(self._seconds) if self._seconds else None
