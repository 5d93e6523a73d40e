"""The GPU work of one server: queued on a stream of its own, and told of when it is done.

The store's thread only queues work, so that buckets that come together are worked on together: where a worker computes
on the same GPU, the two processes take turns on it, and every turn has its price.
"""

from __future__ import annotations

import queue
import threading
from contextlib import AbstractContextManager

import torch

from lockstep.runtime.store import Done
from lockstep.training.pinned_memory import PinnedMemory

_JOIN_SECONDS = 10.0


class GpuLane:
    """One stream, and the thread that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = PinnedMemory()
        self._stream = torch.cuda.Stream(device)
        self._queued: queue.SimpleQueue[tuple[torch.cuda.Event, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="updates on the GPU", daemon=True)
        self._thread.start()

    def queueing(self) -> AbstractContextManager[object]:
        """What is computed inside is queued here."""
        return torch.cuda.stream(self._stream)

    def when_done(self, done: Done) -> None:
        """Call this, on another thread, when all that is queued so far is done."""
        event = torch.cuda.Event()
        event.record(self._stream)
        self._queued.put((event, done))

    def finish(self) -> None:
        """Block until all that is queued is done."""
        self._stream.synchronize()

    def close(self) -> None:
        """End the thread and give the host memory back."""
        self._queued.put(None)
        self._thread.join(_JOIN_SECONDS)
        self.finish()
        self.pinned.close()

    def _run(self) -> None:
        while (item := self._queued.get()) is not None:
            event, done = item
            try:
                event.synchronize()
            except RuntimeError as error:  # of CUDA: whatever was queued has failed
                done(error)
            else:
                done(None)
