"""Buckets carried by torch.distributed: gloo between CPUs, NCCL between GPUs.

A bucket is reduced where it lies, while backward continues. NCCL divides by itself; for gloo each gradient is divided
when it is put into its bucket, as DistributedDataParallel does it: with the same bits. This worker's node is told of
every bucket that was handed over and of every one that came back; comparing the books of all workers shows who is
behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.foreign import read_json
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.messages import ParameterEntry, Setting
from lockstep.protocol.core.plan import first_difference, first_untrained_difference
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.ranks.averager import NO_STATISTICS_ON_CPUS, ModelsDiffer
from lockstep.training.ranks.group import WorkerGroup, first_line
from lockstep.training.ranks.layout import RankLayout, formats
from lockstep.training.tensors import torch_dtype

_LOOK_SECONDS = 0.5


class TorchAverager:
    """The mean over all workers of a group."""

    def __init__(
        self, group: WorkerGroup, layout: RankLayout, device: torch.device, untrained: tuple[Setting, ...] = ()
    ) -> None:
        """ModelsDiffer if this worker's model, or a digest of what is not trained, is not the chief's."""
        self.plan = layout.plan
        self._group = group
        self._node = group.node
        self._layout = layout
        self._copied = layout.copied
        self._agree(untrained)
        self.gradients = self.means = torch.zeros(max(1, self.plan.arena_bytes), dtype=torch.uint8, device=device)
        size = group.meeting.size
        self.scale = 1.0 if group.on_device else 1.0 / size
        self._flat = [self._flat_view(bucket.id) for bucket in self.plan.buckets]
        self._works: dict[BucketId, _Pending] = {}
        self._on_device: deque[tuple[Step, BucketId, dist.Work]] = deque()
        """NCCL only: work that is not known to be finished on the device, oldest first."""
        self._left = False
        """All workers have come to the end of the job."""
        self._looking = threading.Lock()
        self._node.look_with(self._look_at_device)
        self._node.prepare(self.plan)

    def _flat_view(self, number: BucketId) -> Tensor:
        bucket = self.plan.buckets[number]
        flat = self.gradients[bucket.arena_offset : bucket.arena_offset + bucket.nbytes]
        return flat if number in self._copied else flat.view(torch_dtype(bucket.dtype))

    def _agree(self, untrained: tuple[Setting, ...]) -> None:
        entries = [(e.name, e.elements, e.dtype, e.group) for e in self.plan.parameters]
        buffers = [(str(b.dtype), tuple(b.shape)) for b in self._layout.buffers]
        others = (self.plan.bucket_bytes, buffers, formats(self._layout.trained))
        theirs, ours = self._group.agree("untrained", json.dumps([(one.name, one.value) for one in untrained]))
        if theirs != ours:
            chiefs = [Setting(*pair) for pair in read_json(theirs)]
            raise self._differ(f"{first_untrained_difference(chiefs, untrained)}")
        theirs, ours = self._group.agree("entries", json.dumps(entries))
        if theirs != ours:
            known = [ParameterEntry(*entry) for entry in read_json(theirs)]
            difference = first_difference(self.plan.parameters, known)
            raise self._differ(f"{difference}; build the same model on every rank")
        theirs, ours = self._group.agree("rest", hashlib.sha256(repr(others).encode()).hexdigest())
        if theirs != ours:
            raise self._differ(
                "buffers, memory formats (channels_last) or bucket_mb differ; build the same model with the same "
                "options on every rank"
            )

    def _differ(self, what: str) -> ModelsDiffer:
        return ModelsDiffer(f"the model of {self._node.task} is not the chief's: {what}")

    # -- a step --

    def begin(self, step: Step) -> None:
        self._look_at_device()
        self._node.raise_if_ended()
        self._node.begin_step(step)

    def hand_over(self, step: Step, bucket: BucketId) -> None:
        flat = self._flat[bucket]
        try:
            work = self._group.broadcast(flat) if bucket in self._copied else self._group.reduce(flat)
        except RuntimeError as error:
            raise self._node.lost(first_line(error)) from None
        self._works[bucket] = _Pending(work, watched=not self._group.on_device)
        self._node.handed_over(step, bucket)

    def finish(self, step: Step) -> None:
        self._node.backward_ended(step)
        for bucket, pending in self._works.items():
            self._wait(step, bucket, pending)
        self._works.clear()
        self._node.between_steps()

    def _wait(self, step: Step, bucket: BucketId, pending: _Pending) -> None:
        """Wait for one bucket. The node's watchdog reports who is behind, and ends a wait that cannot succeed."""
        if self._group.on_device:
            pending.work.wait()  # only makes the GPU's stream wait
            self._on_device.append((step, bucket, pending.work))
            return
        while not pending.done.wait(_LOOK_SECONDS):
            self._node.raise_if_ended()
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise self._node.lost(first_line(error)) from None
        self._node.summed(step, bucket)

    def _look_at_device(self) -> None:
        """Notify the node of what the device has finished since the last check, without synchronising."""
        with self._looking:
            while self._on_device and self._on_device[0][2].is_completed():
                step, number, _ = self._on_device.popleft()
                self._node.summed(step, number)

    # -- outside the steps --

    def take_initial(self) -> Step:
        if self._node.start_step > INITIAL_STEP:
            return self._node.start_step
        for flat in self._flat:
            self._safely(self._group.broadcast(flat))
        return 0

    def share_with_torch(self) -> None:
        if self.gradients.device.type != "cuda":
            raise ValueError(NO_STATISTICS_ON_CPUS)
        self._group.make_global()

    def publish(self, step: Step) -> None:
        self.begin(step)
        for bucket in range(len(self._flat)):
            self._node.handed_over(step, bucket)
        self._node.backward_ended(step)
        for bucket, flat in enumerate(self._flat):
            self._safely(self._group.broadcast(flat))
            self._node.summed(step, bucket)
        self._node.between_steps()

    def _safely(self, work: dist.Work) -> None:
        pending = _Pending(work, watched=not self._group.on_device)
        while not self._group.on_device and not pending.done.wait(_LOOK_SECONDS):
            self._node.raise_if_ended()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._node.lost(first_line(error)) from None

    def differs(self, step: Step, parameter: str) -> JobEndedError:
        return self._node.drifted(step, parameter)

    def leave(self, steps: Step) -> None:
        if self._group.on_device:
            torch.cuda.synchronize(self.gradients.device)
        self._look_at_device()
        self._node.finish(steps)
        self._node.tell_unsaved()
        with contextlib.suppress(JobEndedError):  # it has ended well; only the store has to outlive its users
            self._group.wait_for_all("end")
            self._left = True

    def close(self) -> None:
        self._node.look_with(lambda: None)
        with self._looking:
            self._on_device.clear()
        self._works.clear()
        self._group.close(early=not self._left)


class _Pending:
    """A reduction under way; ``done`` is set by the thread that carries it out, however it ends."""

    def __init__(self, work: dist.Work, *, watched: bool) -> None:
        self.work = work
        self.done = threading.Event()
        if watched:
            work.get_future().add_done_callback(lambda _: self.done.set())
