"""The GPU work of one server: queued on a stream of its own, and told of when it is done.

The store's thread only queues work, so that buckets that come together are worked on together: where a worker computes
on the same GPU, the two processes take turns on it, and every turn has its price.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from lockstep.protocol.ids import BucketId
from lockstep.protocol.plan import Plan
from lockstep.runtime.store import Done
from lockstep.training.pinned_memory import PinnedMemory
from lockstep.training.shared_events import OpenedEvents, OwnEvents, table_at

_JOIN_SECONDS = 10.0
DRAIN_SECONDS = 3.0
"""What is queued on a GPU takes milliseconds; what takes longer waits for a task that is gone."""
_POLL_SECONDS = 0.01


class GpuLane:
    """One stream, and the thread that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = PinnedMemory()
        self._stream = torch.cuda.Stream(device)
        self._queued: queue.SimpleQueue[tuple[torch.cuda.Event, Done] | None] = queue.SimpleQueue()
        self._server = 0
        self._own: OwnEvents | None = None
        self._workers: OpenedEvents | None = None
        self._thread = threading.Thread(target=self._run, name="updates on the GPU", daemon=True)
        self._thread.start()

    def share(self, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        """Let workers on this GPU wait for updates by themselves, and wait for their gradients here."""
        buckets = len(plan.buckets)
        self._server = server
        self._own = OwnEvents(self.device, server, buckets, slots, table_at(plan.shard_room(server)))
        self._workers = OpenedEvents(self.device, buckets, table_at(plan.arena_bytes))

    def take(self, bucket: BucketId, gradients: Sequence[memoryview]) -> bool:
        """Let what is queued next wait for these gradients; whether their workers all wait for the update likewise."""
        pinned = [self.pinned.pin(gradient) for gradient in gradients]
        if self._own is None or self._workers is None or not pinned or not all(pinned):
            return False
        shared = []
        for gradient in gradients:
            known, is_new = self._workers.open(gradient)
            if known is not None:
                known.wait(bucket, self._stream)
            if known is not None and is_new:
                self._own.let_read(known.owner)
            shared.append(known is not None and known.lets_read(self._server))
        return all(shared)

    def hand_on(self, bucket: BucketId, done: Done, *, at_once: bool) -> None:
        """What is queued so far makes the next version of this bucket. ``at_once``: who reads it waits by itself."""
        if self._own is not None:
            self._own.record(bucket, self._stream)
        if at_once:
            done(None)
        else:
            self.when_done(done)

    def let_go(self, slots: Sequence[memoryview]) -> None:
        """Workers have come: keep nothing of the memory that was lent before, only these slots."""
        self.finish()
        if self._workers is not None:
            self._workers.forget()
        self.pinned.keep_only(slots)

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
        # A worker that was killed never passes its event, and whoever waits for that waits in vain.
        if ends_soon(self._stream, DRAIN_SECONDS):
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


def ends_soon(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Whether all that is queued ends within this time."""
    deadline, never = time.monotonic() + seconds, threading.Event()
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        never.wait(_POLL_SECONDS)
    return True
