"""A worker's arenas on a GPU, with pinned host memory between them and the transport.

Copies run on two streams of their own, next to the computation. A thread waits for each event and only then hands the
bucket on: the callbacks of transports and hooks never block (a blocking copy in the only callback thread is what hung
the system we follow).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.protocol.ids import INITIAL_STEP, BucketId, Step
from lockstep.protocol.plan import Plan
from lockstep.runtime.worker_node import WorkerNode
from lockstep.training.tensors import as_tensor
from lockstep.transports.base import Loan

_JOIN_SECONDS = 10.0


class CudaMemory:
    """For models on a GPU."""

    def __init__(self, node: WorkerNode, plan: Plan, device: torch.device) -> None:
        gradients, parameters = node.allocate(plan)
        self._node = node
        self._plan = plan
        self._device = device
        self._host_gradients = as_tensor(gradients.buffer, torch.uint8)
        self._host_parameters = as_tensor(parameters.buffer, torch.uint8)
        self._pinned = [_pin(tensor) for tensor in (self._host_gradients, self._host_parameters)]
        kind = "pinned" if all(self._pinned) else "pageable"
        node.tell_path(f"{node.task.short}: tensors of the GPU travel through {kind} host memory (no GPUDirect)")
        self.gradients: Tensor = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        self.parameters: Tensor = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._versions = [INITIAL_STEP] * len(plan.buckets)
        self._changed = threading.Condition()
        self._events: list[torch.cuda.Event | None] = [None] * len(plan.buckets)
        self._downs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ups: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(jobs,), name=f"copy {what} {node.task.short}", daemon=True)
            for what, jobs in (("down", self._downs), ("up", self._ups))
        ]
        for thread in self._threads:
            thread.start()

    # -- gradients go down --

    def filled(self, step: Step, bucket: BucketId) -> None:
        """Training thread: start the copy to the host; the bucket is handed on when it has ended."""
        where = self._range(bucket)
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._down):
            self._down.wait_event(computed)
            self._host_gradients[where].copy_(self.gradients[where], non_blocking=True)
            copied.record(self._down)

        def hand_on() -> None:
            copied.synchronize()
            self._node.produced(step, bucket)

        self._downs.put(hand_on)

    def after_filled(self, action: Callable[[], None]) -> None:
        """Training thread: do this once every bucket that was filled so far has been copied and handed on."""
        self._downs.put(action)

    def initial_values_are_in(self) -> None:
        """Chief: the gradient arena holds the initial parameters."""
        self._host_gradients.copy_(self.gradients)
        self._node.offer_initial()

    # -- parameters come up --

    def arrived(self, bucket: BucketId, version: int, loan: Loan | None) -> None:
        """Loop's thread: a bucket is in host memory; let the copy thread bring it up."""
        assert loan is None, "parameters for a GPU come into pinned memory"
        self._ups.put(lambda: self._bring_up(bucket, version))

    def _bring_up(self, bucket: BucketId, version: int) -> None:
        where = self._range(bucket)
        copied = torch.cuda.Event()
        with torch.cuda.device(self._device), torch.cuda.stream(self._up):
            self.parameters[where].copy_(self._host_parameters[where], non_blocking=True)
            copied.record(self._up)
        with self._changed:
            self._events[bucket] = copied
            self._versions[bucket] = version
            self._changed.notify_all()

    def wait(self, version: int) -> int:
        """Training thread: block until every copy up has started, then let the computation wait for them on the GPU."""
        reached = self._node.wait_version(version)
        with self._changed:
            while min(self._versions, default=reached) < reached:
                self._node.raise_if_ended()
                self._changed.wait(1.0)
        stream = torch.cuda.current_stream(self._device)
        for event in self._events:
            if event is not None:
                stream.wait_event(event)
        return reached

    def newest(self, likes: Sequence[Tensor]) -> list[Tensor] | None:  # noqa: ARG002 - as of every memory
        """The values are always in the arena."""
        return None

    def release_former(self) -> None:
        """Nothing is lent."""

    def _range(self, bucket: BucketId) -> slice:
        known = self._plan.buckets[bucket]
        return slice(known.arena_offset, known.arena_offset + known.nbytes)

    def close(self) -> None:
        """End the copy threads and unpin the host memory."""
        for jobs in (self._downs, self._ups):
            jobs.put(None)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        torch.cuda.synchronize(self._device)
        for pinned, tensor in zip(self._pinned, (self._host_gradients, self._host_parameters), strict=True):
            if pinned:
                torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _pin(tensor: Tensor) -> bool:
    """Pin memory that the transport owns, so that copies run beside the computation. Without it they still work."""
    if not tensor.numel():
        return False
    result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    return int(result) == 0
