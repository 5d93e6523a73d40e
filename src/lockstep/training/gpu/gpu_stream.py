"""The GPU work of one server: queued on a separate stream, and reported when it is done.

The store's thread only queues work, so that buckets that arrive together are processed together: if a worker computes
on the same GPU, the two processes take turns on it, and every turn has a cost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.task.store import Done
from lockstep.training.gpu.pinned_memory import PinnedMemory
from lockstep.training.gpu.server_twins import ServerTwins
from lockstep.training.gpu.shared_events import OpenedEvents, OwnEvents, table_at

_JOIN_SECONDS = 10.0
DRAIN_SECONDS = 3.0
"""Work queued on a GPU takes milliseconds; work that takes longer waits for a task that has ended."""
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class TakenGradients:
    """Gradients that the next work may read, once their workers' events have passed."""

    on_gpu: tuple[Tensor | None, ...]
    """The bytes of each where its worker has it, if that is on this GPU."""
    readers_wait: bool
    """All their workers wait for updates directly."""


class GpuStream:
    """One stream, and the thread that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = PinnedMemory()
        self._stream = torch.cuda.Stream(device)
        self._queued: queue.SimpleQueue[tuple[torch.cuda.Event, Done] | None] = queue.SimpleQueue()
        self._server = 0
        self._own: OwnEvents | None = None
        self._workers: OpenedEvents | None = None
        self.twins: ServerTwins | None = None
        """What stays on the GPU between it and its workers, if anything."""
        self._thread = threading.Thread(target=self._run, name="updates on the GPU", daemon=True)
        self._thread.start()

    def share(self, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        """Let workers on this GPU wait for updates directly, and wait for their gradients here."""
        buckets = len(plan.buckets)
        self._server = server
        self._own = OwnEvents(self.device, server, buckets, slots, table_at(plan.shard_room(server)))
        self._workers = OpenedEvents(self.device, buckets, table_at(plan.arena_bytes))
        self.twins = ServerTwins.on(self.device, plan, server, slots)

    def take(self, bucket: BucketId, gradients: Sequence[memoryview]) -> TakenGradients:
        """Make the next work wait for these gradients."""
        on_gpu = tuple(None if self.twins is None else self.twins.find(bucket, gradient) for gradient in gradients)
        reachable = [
            twin is not None or self.pinned.pin(gradient) for twin, gradient in zip(on_gpu, gradients, strict=True)
        ]
        if self._own is None or self._workers is None or not reachable or not all(reachable):
            return TakenGradients(on_gpu, readers_wait=False)
        shared = []
        for gradient in gradients:
            known, is_new = self._workers.open(gradient)
            if known is not None:
                known.wait(bucket, self._stream)
            if known is not None and is_new:
                self._own.let_read(known.owner)
            shared.append(known is not None and known.lets_read(self._server))
        return TakenGradients(on_gpu, readers_wait=all(shared))

    def hand_on(self, bucket: BucketId, done: Done, *, at_once: bool) -> None:
        """The work queued so far makes this bucket's next version. ``at_once``: its readers wait for it directly."""
        if self._own is not None:
            self._own.record(bucket, self._stream)
        if at_once:
            done(None)
        else:
            self.when_done(done)

    def let_go(self, slots: Sequence[memoryview]) -> None:
        """Workers have joined: release all memory lent before, and keep only these slots."""
        self.finish()
        if self._workers is not None:
            self._workers.forget()
        if self.twins is not None:
            self.twins.forget()
        self.pinned.keep_only(slots)

    def queueing(self) -> AbstractContextManager[object]:
        """What is computed inside is queued on this stream."""
        return torch.cuda.stream(self._stream)

    def when_done(self, done: Done) -> None:
        """Call this, on another thread, when everything queued so far is done."""
        event = torch.cuda.Event()
        event.record(self._stream)
        self._queued.put((event, done))

    def finish(self) -> None:
        """Block until everything queued is done."""
        self._stream.synchronize()

    def close(self) -> None:
        """End the thread and release the host memory."""
        self._queued.put(None)
        self._thread.join(_JOIN_SECONDS)
        # A worker that was killed never passes its event, and a wait for it would never end.
        if ends_soon(self._stream, DRAIN_SECONDS):
            self.pinned.close()
            if self.twins is not None:
                self.twins.close()

    def _run(self) -> None:
        while (item := self._queued.get()) is not None:
            event, done = item
            try:
                event.synchronize()
            except RuntimeError as error:  # from CUDA: the queued work has failed
                done(error)
            else:
                done(None)


def ends_soon(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Whether everything queued ends within this time."""
    deadline, never = time.monotonic() + seconds, threading.Event()
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        never.wait(_POLL_SECONDS)
    return True
