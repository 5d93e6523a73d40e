"""A worker's arenas on a GPU, with pinned host memory between them and the transport.

Copies run on two separate streams, alongside the computation. Threads wait for their events and only then pass on a
bucket or return a loan: the callbacks of transports and hooks never block (a blocking copy in the only callback
thread is what hung the system that Lockstep follows). Parameters of a server on this host are read where it has them;
those of a server on this GPU do not leave it (``worker_twins.py``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.events import Broken
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Role, Step, TaskId
from lockstep.protocol.core.plan import Bucket, Plan
from lockstep.runtime import phrases
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.gpu.gpu_idle import GpuIdle
from lockstep.training.gpu.gpu_stream import DRAIN_SECONDS, ends_soon
from lockstep.training.gpu.pinned_memory import PinnedMemory, pins_read_only
from lockstep.training.gpu.shared_events import OwnEvents, PeerEvents, gpu_of, is_on_gpu, open_events, table_at
from lockstep.training.gpu.twin_places import room_for_tables
from lockstep.training.gpu.worker_twins import WorkerTwins
from lockstep.training.tensors import as_tensor
from lockstep.training.torch_private import foreach_copy_
from lockstep.training.wire_format import WireFormat
from lockstep.transports.base import Loan, MovesGpuMemory

_JOIN_SECONDS = 10.0
_POLL_SECONDS = 0.0005
_TOGETHER_BYTES = 4 << 20
"""Smaller buckets, and those that stay on the GPU, are copied together with the last one: it takes no noticeable time.
"""
_Jobs = queue.SimpleQueue[Callable[[], None] | None]


@dataclass(frozen=True, slots=True)
class _Coming:
    """A bucket of new parameters that has arrived in host memory, or will have when its server's event passes."""

    bucket: BucketId
    version: int
    loan: Loan | None


class CudaMemory:
    """For models on a GPU."""

    gradients: Tensor
    parameters: Tensor

    def __init__(self, node: WorkerNode, plan: Plan, device: torch.device, wire: WireFormat) -> None:
        self._node = node
        self._plan = plan
        self._device = device
        self._wire = wire
        self._pinned = PinnedMemory()
        self.parameters = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        self._own: OwnEvents | None = None
        self._twins: WorkerTwins | None = None
        self.is_direct = isinstance(node.transport, MovesGpuMemory) and node.transport.gpu_direct and not wire.narrows
        self._leaving, self._landing = self._register_gpu() if self.is_direct else self._register_host()
        self.idle = GpuIdle(device)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._versions = [INITIAL_STEP] * len(plan.buckets)
        self._local: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in plan.buckets]
        """By bucket: where the model has parameters outside the arena, and where in the arena they arrive."""
        self._read_until: torch.cuda.Event | None = None
        self._step_before: torch.cuda.Event | None = None
        self._version_coming, self._came = INITIAL_STEP, 0
        self._held: list[_Coming] = []
        self._serving: list[PeerEvents | None] = [None] * plan.servers
        self._apart: set[int] = set()
        self._changed = threading.Condition()
        self._events: list[torch.cuda.Event | None] = [None] * len(plan.buckets)
        self._downs: _Jobs = queue.SimpleQueue()
        self._ups: _Jobs = queue.SimpleQueue()
        self._loans: _Jobs = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=f"{what} {node.task.short}", daemon=True)
            for what, jobs in (("copy down", self._downs), ("copy up", self._ups), ("give back", self._loans))
        ]
        for thread in self._threads:
            thread.start()

    def _register_gpu(self) -> tuple[Tensor, Tensor]:
        """Where gradients are sent from and parameters arrive, for a network device that accesses the GPU directly."""
        transport, number = self._node.transport, self._device.index or 0
        assert isinstance(transport, MovesGpuMemory)
        # New parameters arrive next to those that the model still computes with.
        landing = torch.zeros_like(self.parameters)
        self.gradients = torch.zeros_like(self.parameters)
        leaving = self.gradients
        regions = [transport.register_gpu(one.data_ptr(), max(one.numel(), 1), number) for one in (leaving, landing)]
        self._node.use(self._plan, regions[0], regions[1])
        self._node.tell_path(f"{self._node.task.short}: the network device reads and writes its GPU itself (GPUDirect)")
        return leaving, landing

    def _register_host(self) -> tuple[Tensor, Tensor]:
        """The same in host memory, pinned if possible."""
        node, plan = self._node, self._plan
        # Loans are copied at once, so that programs may write to their parameters freely.
        gradients, parameters = node.allocate(plan, in_place=pins_read_only(), spare=room_for_tables(plan))
        # Parameters that are read where servers have them never arrive in the region for them.
        used = [gradients] if node.reads_in_place else [gradients, parameters]
        pinned = [self._pinned.pin(region.buffer) for region in used]
        kind = "pinned" if all(pinned) else "pageable"
        node.tell_path(f"{node.task.short}: tensors of the GPU travel through {kind} host memory (no GPUDirect)")
        # A worker that rejoins must find what it passed on in its previous incarnation: so nothing is passed on early.
        if all(pinned) and not node.keeps_state:
            at = table_at(plan.arena_bytes)
            self._own = OwnEvents(self._device, node.task.index, len(plan.buckets), [gradients.buffer], at)
            self._twins = WorkerTwins.of(node, plan, self._device, gradients.buffer)
        # Where gradients leave as they are, they are read where they are filled.
        shared = None if self._twins is None or self._wire.narrows else self._twins.leaving
        self.gradients = torch.zeros_like(self.parameters) if shared is None else shared
        self._parameters = parameters.buffer
        leaving = as_tensor(gradients.buffer[: plan.arena_bytes], torch.uint8)
        return leaving, as_tensor(parameters.buffer, torch.uint8)

    # -- gradients go down --

    @property
    def stays_on_gpu(self) -> bool:
        """Whether every server reads gradients in the GPU's memory."""
        return self._twins is not None and all(map(self._twins.is_read_by, range(self._plan.servers)))

    def filled(self, step: Step, bucket: BucketId, *, in_full: bool = False) -> None:
        """Training thread: start the copy to the host; the bucket is passed on when the copy is done.

        ``in_full``: it holds parameters, which are not rounded.
        """
        known = self._plan.buckets[bucket]
        nbytes = known.nbytes if in_full else self._wire.nbytes(known)
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._down):
            self._down.wait_event(computed)
            if not self.is_direct:
                whole = self.gradients[self._range(bucket)]
                self._let_leave(known, whole if in_full else self._wire.narrowed(known, whole))
            copied.record(self._down)
        if self._own is not None:
            self._own.record(bucket, self._down)
        server_waits = self._is_waited_for(known.server)

        def hand_on() -> None:
            if not server_waits:
                copied.synchronize()
            self._node.produced(step, bucket, nbytes)

        self._downs.put(hand_on)

    def _let_leave(self, bucket: Bucket, sent: Tensor) -> None:
        """Copy these bytes to where the server reads them, unless it reads them where they are."""
        where = slice(bucket.arena_offset, bucket.arena_offset + sent.numel())
        twins = self._twins
        if twins is not None and self._wire.narrows:
            twins.leaving[where].copy_(sent)
        if twins is None or not twins.is_read_by(bucket.server):
            self._leaving[where].copy_(sent, non_blocking=True)

    def _is_waited_for(self, server: int) -> bool:
        """Whether this server's GPU waits for our copies directly, and ours for its updates."""
        known = self._serving[server]
        return known is not None and known.lets_read(self._node.task.index)

    def after_filled(self, action: Callable[[], None]) -> None:
        """Training thread: do this once every bucket filled so far has been copied and passed on."""
        # The program may have queued work so far that reads its parameters: new ones must not overtake it.
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._read_until = event
        self._downs.put(action)

    def in_order(self, action: Callable[[], None]) -> None:
        """Training thread: do this after everything that was passed on or requested so far.

        New parameters may arrive before a step's seal has been sent: the next step must not be announced before it.
        """
        self._downs.put(action)

    def initial_values_are_in(self) -> None:
        """Chief: the gradient arena holds the initial parameters."""
        if not self.is_direct:
            self._leaving.copy_(self.gradients)
        torch.cuda.synchronize(self._device)
        self._node.offer_initial()

    # -- parameters come up --

    @property
    def arrives_in_parts(self) -> bool:
        """Whether the first buckets of a version are here noticeably earlier than the last ones. Where a server's GPU
        and ours wait for each other, all of them are queued long before they are computed. Where this worker may come
        back, it tells its state when a step begins, and that must not overtake the seal of the step before."""
        return not any(self._serving) and not self._node.keeps_state

    def copy_on_arrival(self, bucket: BucketId, local: Tensor, value: Tensor) -> None:
        """Before the first version: copy ``value``, a part of the arena, to that place when this bucket arrives."""
        self._local[bucket][0].append(local)
        self._local[bucket][1].append(value)

    def arrived(self, bucket: BucketId, version: int, loan: Loan | None) -> None:
        """Loop's thread: a bucket is in host memory, here or at its server; start its copy up.

        Starting a copy of pinned memory takes no time. Memory that is not pinned yet is left to a thread that may wait.
        """
        lent = self._parameters if loan is None else loan.buffer
        if self.is_direct or self._pinned.is_pinned(lent) or self._twin_of(loan) is not None:
            self._bring_up(bucket, version, loan)
        else:
            self._ups.put(lambda: self._pin_and_bring_up(bucket, version, loan))

    def _pin_and_bring_up(self, bucket: BucketId, version: int, loan: Loan | None) -> None:
        server = self._plan.buckets[bucket].server
        if loan is not None:
            reachable = self._is_reachable(server, loan.buffer)
            if reachable and self._own is not None:
                self._share_events(server, loan.buffer, self._own)
            elif self._node.keeps_state:
                self._tell_why_apart(server, loan.buffer)
            events = self._serving[server]
            if events is not None and not reachable:
                events.synchronize(bucket)  # the CPU copies, and must not overtake the GPU
        else:
            self._pinned.pin(self._parameters)
        self._bring_up(bucket, version, loan)

    def _is_reachable(self, server: int, lent: memoryview) -> bool:
        """Whether the GPU itself can read what this server lends: in its twin, or in pinned memory."""
        return (self._twins is not None and self._twins.open(server, lent)) or self._pinned.pin(lent)

    def _twin_of(self, loan: Loan | None) -> Tensor | None:
        return None if self._twins is None or loan is None else self._twins.twin_of(loan.buffer)

    def _share_events(self, server: int, lent: memoryview, own: OwnEvents) -> None:
        """This server's first version has arrived: if its GPU is ours, the two wait for each other from now on."""
        if self._serving[server] is not None:
            return
        at = table_at(self._plan.shard_room(server))
        known = open_events(lent, at, len(self._plan.buckets), self._device)
        if known is None:
            return
        self._serving[server] = known
        own.let_read(server)
        peer = TaskId(Role.SERVER, server).short
        self._node.tell_path(
            f"{self._node.task.short} and {peer} are on one GPU, which waits for their copies by itself"
        )

    def _tell_why_apart(self, server: int, lent: memoryview) -> None:
        """Once for each server on this GPU."""
        at = table_at(self._plan.shard_room(server))
        if server in self._apart or not is_on_gpu(lent, at, len(self._plan.buckets), gpu_of(self._device)):
            return
        self._apart.add(server)
        self._node.tell_path(
            f"{self._node.task.short} and {TaskId(Role.SERVER, server).short} are on one GPU; their tensors cross host "
            "memory, where they outlive a lost worker"
        )

    def _bring_up(self, bucket: BucketId, version: int, loan: Loan | None) -> None:
        for one in self._come(_Coming(bucket, version, loan)):
            self._copy_up(one)

    def _come(self, one: _Coming) -> list[_Coming]:
        """What to copy now that this bucket has arrived.

        Two processes on one GPU take turns on it, some milliseconds each unless MPS is running. So everything that a
        server updates in one turn, at the end of a step, is awaited as a whole: copying the first bucket would give the
        turn to this process, and the server's second bucket would have to wait for its next turn.
        """
        known = self._plan.buckets[one.bucket]
        with self._changed:
            if one.version != self._version_coming:
                self._version_coming, self._came = one.version, 0
            self._came += 1
            self._held.append(one)
            shared = one.loan is not None and self._serving[known.server] is not None
            is_short = known.nbytes < _TOGETHER_BYTES or self._twin_of(one.loan) is not None
            if shared and is_short and self._came < len(self._plan.buckets):
                return []
            ready, self._held = self._held, []
        for held in ready:
            events = self._serving[self._plan.buckets[held.bucket].server]
            if held.loan is not None and events is not None:
                events.wait(held.bucket, self._up)
        return ready

    def _copy_up(self, one: _Coming) -> None:
        bucket, loan, where = one.bucket, one.loan, self._range(one.bucket)
        source = self._landing[where] if loan is None else self._source(bucket, loan)
        copied = torch.cuda.Event(blocking=True)
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._up):
            if self._read_until is not None:
                self._up.wait_event(self._read_until)
            self.parameters[where].copy_(source, non_blocking=True)
            locals_, values = self._local[bucket]
            if locals_:
                foreach_copy_(locals_, values)
            copied.record(self._up)
        with self._changed:
            self._events[bucket] = copied
            self._versions[bucket] = one.version
            self._changed.notify_all()
        if loan is not None:
            self._loans.put(lambda: _give_back(copied, loan))

    def _source(self, bucket: BucketId, loan: Loan) -> Tensor:
        twin = self._twin_of(loan)
        if twin is None:
            return as_tensor(loan.buffer, torch.uint8)
        known = self._plan.buckets[bucket]
        return twin[known.shard_offset : known.shard_offset + known.nbytes]

    def wait(self, version: int) -> int:
        """Training thread: block until every copy up has started, then let the GPU's computation wait for them."""
        self.idle.begins()
        reached = self._node.wait_version(version)
        with self._changed:
            while min(self._versions, default=reached) < reached:
                self._node.raise_if_ended()
                self._changed.wait(1.0)
        stream = torch.cuda.current_stream(self._device)
        for event in self._events:
            if event is not None:
                stream.wait_event(event)
        self.idle.ends()
        self._stay_near()
        return reached

    def settle(self, version: int, buckets: Collection[BucketId]) -> None:
        """Training thread: these buckets have arrived here; block until they are in the model's memory.

        Not only the stream of this thread waits: in the middle of a program another one may use them next.
        """
        with self._changed:
            while any(self._versions[bucket] < version for bucket in buckets):
                self._node.raise_if_ended()
                self._changed.wait(1.0)
            copies = {bucket: copied for bucket in buckets if (copied := self._events[bucket]) is not None}
        for bucket, copied in copies.items():
            copied.synchronize()
            with self._changed:
                if self._events[bucket] is copied:
                    self._events[bucket] = None  # whoever needs this bucket next need not ask the GPU

    def _stay_near(self) -> None:
        """Stay at most one step ahead of the GPU: if the GPUs wait for each other, nothing else limits this thread."""
        before, self._step_before = self._step_before, self._read_until
        while before is not None and not before.query():
            self._node.raise_if_ended()
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def newest(self, likes: Sequence[Tensor]) -> list[Tensor] | None:  # noqa: ARG002 - as of every memory
        """The values are always in the arena."""
        return None

    def release_former(self) -> None:
        """Loans are returned as soon as they are copied."""

    def _range(self, bucket: BucketId) -> slice:
        known = self._plan.buckets[bucket]
        return slice(known.arena_offset, known.arena_offset + known.nbytes)

    def close(self) -> None:
        """End the copy threads and unpin the host memory."""
        for jobs, thread in zip((self._downs, self._ups, self._loans), self._threads, strict=True):
            jobs.put(None)
            thread.join(_JOIN_SECONDS)
        # A server that was killed never passes its event, and a wait for it would never end.
        if all(ends_soon(stream, DRAIN_SECONDS) for stream in (self._down, self._up)):
            torch.cuda.synchronize(self._device)
            self._pinned.close()
            if self._twins is not None:
                self._twins.close()

    def _run(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever it is, the job is notified and ends
                reason = failure_of(error, phrases.cannot_copy(error), (torch.OutOfMemoryError,))
                self._node.loop.post(Broken(self._node.task, self._node.machine.role.step, reason))


def _give_back(copied: torch.cuda.Event, loan: Loan) -> None:
    copied.synchronize()
    loan.release()
