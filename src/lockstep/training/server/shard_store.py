"""A server's shard in torch: reduces the workers' gradients, and the optimizer makes the next version.

The optimizer is the named class of torch.optim, on the flat bucket or on parts of it (``bucket_optimizer.py``): its
kernels work element by element, so packing and cutting parameters changes nothing but the number of calls. With two
slots a version is made out of place: the old one is copied into the other slot first, part by part, and the optimizer
works there (plain SGD on a CPU needs no copy: ``sgd.py``). With one slot it is written over the old one.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.protocol.core.effects import Apply, Measure
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.messages import Layout, OptimizerEntry
from lockstep.protocol.core.norms import combined
from lockstep.protocol.core.plan import Bucket, Plan
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.task.store import Done, Found, StoreTimes
from lockstep.training.gpu.gpu_stream import GpuStream, TakenGradients
from lockstep.training.gpu.twin_places import room_for_tables
from lockstep.training.server.bucket_digest import digest_of
from lockstep.training.server.bucket_norm import BucketSpan, begin_norm, norms_of, spans_of
from lockstep.training.server.bucket_optimizer import BucketOptimizer
from lockstep.training.server.clipping import Clipping
from lockstep.training.server.mean_room import MeanRoom, Whole
from lockstep.training.server.optimizer_state import pack, unpack
from lockstep.training.server.piece_pool import PiecePool
from lockstep.training.server.sgd import mean_of, next_version
from lockstep.training.server.shard_file import STATE, VALUE, PieceName, ShardFiles, named
from lockstep.training.tensors import as_tensor, torch_dtype
from lockstep.training.wire_format import WireFormat

GET_STATE, PUT_STATE = "the optimizer's state", "to load the optimizer's state"
STATE_HEADER = struct.Struct("<IQQ")
"""Precedes the bytes of a state request or response: bucket, offset, total length."""
STATE_CHUNK = 4 << 20
_STATE_PER_ELEMENT = 4 * 8
"""Bytes: no optimizer keeps more than three tensors as large as its parameters."""
_STATE_PER_PIECE = 4 << 10
"""Its few numbers, and the names of all of it."""


@dataclass(slots=True)
class _Held:
    """One bucket: its slots, and the optimizer that steps from one to another."""

    slots: tuple[Tensor, ...]
    on_gpu: tuple[Tensor, ...]
    """On a GPU, by slot: one tensor for all of them, which has the newest version; or (``in_twins``) the slot's twin,
    which workers on the same GPU read. Empty without a GPU."""
    optimizer: BucketOptimizer
    group: int
    bucket: Bucket
    spans: list[BucketSpan]
    """In which its norm is measured."""
    in_twins: bool = False

    def slot_of(self, version: int) -> int:
        return version % len(self.slots)


class TorchShardStore:
    """Implements ``runtime.task.store.ShardStore``; all its calls come on one thread."""

    def __init__(
        self,
        device: torch.device | None = None,
        wire: WireFormat | None = None,
        helpers: int = 0,
        *,
        stays_on_gpu: bool = True,
    ) -> None:
        """``device``: where reduction and update run; the CPU by default. ``wire``: the format in which gradients
        arrive. ``helpers``: threads that take part in updates on a CPU. ``stays_on_gpu``: what goes between this server
        and workers on the same GPU need not pass host memory; with second homes it must."""
        self._stays_on_gpu = stays_on_gpu
        self._wire = wire or WireFormat()
        self._device = device or torch.device("cpu")
        self._lane = GpuStream(self._device) if self._device.type == "cuda" else None
        self._crew = PiecePool(helpers)
        self._held: dict[BucketId, _Held] = {}
        self._incoming: dict[BucketId, bytearray] = {}
        self._names: tuple[str, ...] = ()
        self._slots: list[memoryview] = []
        self._sums: dict[torch.dtype, Tensor] = {}
        """Where gradients are summed on a GPU: one place for all buckets, which are updated one by one."""
        self.times = StoreTimes()

    def prepare(self, layout: Layout, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        self._names = tuple(entry.name for entry in plan.parameters)
        if self._lane is not None:
            self._slots += slots
            pinned = [self._lane.pinned.pin(slot) for slot in slots]
            if all(pinned) and self._stays_on_gpu:
                self._lane.share(plan, server, slots)
        with self._on_device():
            for bucket in plan.buckets_of(server):
                entry = layout.optimizers[bucket.group]
                self._held[bucket.id] = self._hold(bucket, entry, slots, plan.shard_room(server))

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """What is computed inside comes after all updates begun before, and is done when the block ends."""
        self._crew.finish()
        if self._lane is None:
            yield
            return
        self._lane.finish()  # the slots are host memory, which is read and written synchronously
        with self._lane.queueing():
            yield
        self._lane.finish()

    def _hold(self, bucket: Bucket, entry: OptimizerEntry, slots: Sequence[memoryview], shard_bytes: int) -> _Held:
        dtype = torch_dtype(bucket.dtype)
        where = slice(bucket.shard_offset, bucket.shard_offset + bucket.nbytes)
        tensors = tuple(as_tensor(slot[where], dtype) for slot in slots)
        values = tensors[0]
        on_gpu: tuple[Tensor, ...] = ()
        if self._lane is not None:
            values = torch.zeros_like(values, device=self._device)
            on_gpu = (values,) * len(tensors)
        optimizer = BucketOptimizer(entry, bucket, values, self._crew.size, shard_bytes)
        spans = spans_of(optimizer.ranges(), values.element_size())
        return _Held(tensors, on_gpu, optimizer, bucket.group, bucket, spans)

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        held, lane = self._held[effect.bucket], self._lane
        given = [as_tensor(one, self._wire.dtype_of(held.bucket, one.nbytes)) for one in gradients]
        if lane is None:
            self._apply(held, effect, given, done)
            return
        taken = lane.take(effect.bucket, gradients)
        with lane.queueing():
            self._apply_on_gpu(lane, held, effect, _nearest(given, taken, effect.step))
            lane.hand_on(effect.bucket, done, at_once=taken.readers_wait)

    def begin_and_keep(
        self, effect: Apply, gradients: Sequence[memoryview], mean: memoryview, whole: Whole, done: Done
    ) -> None:
        held = self._held[effect.bucket]
        room = as_tensor(mean, torch_dtype(held.bucket.dtype))
        given = [as_tensor(one, self._wire.dtype_of(held.bucket, one.nbytes)) for one in gradients]
        if self._lane is None and effect.step > INITIAL_STEP and not effect.values:
            self._make_ready(held, effect)
            old, new = held.slots[effect.from_slot], held.slots[effect.to_slot]
            self._update(held, old, new, given, effect, done, MeanRoom(room, whole))
            return
        if self._lane is None or effect.step == INITIAL_STEP or effect.values:
            room.copy_(given[0])
        else:
            self._reduce_on_gpu(self._lane, effect, gradients, mean)
        whole()
        self.begin(replace(effect, replicas=1, scale=1.0, limit=math.inf), [mean], done)

    def _reduce_on_gpu(self, lane: GpuStream, effect: Apply, gradients: Sequence[memoryview], mean: memoryview) -> None:
        """Into host memory, from which both homes take it."""
        held = self._held[effect.bucket]
        given = [as_tensor(one, self._wire.dtype_of(held.bucket, one.nbytes)) for one in gradients]
        lane.pinned.pin(mean)
        lane.take(effect.bucket, gradients)
        with self._on_device():
            found = self._mean_on_gpu(held, held.on_gpu[0], given, effect.replicas, lent=False)
            Clipping.of(effect).clip(found)
            as_tensor(mean, torch_dtype(held.bucket.dtype)).copy_(found, non_blocking=True)

    def copy_out(self, bucket: BucketId, version: int) -> bytes:
        held = self._held[bucket]
        with self._on_device():
            values: bytes = held.slots[held.slot_of(version)].view(torch.uint8).numpy().tobytes()
            return values + pack(held.optimizer.states())

    def take_in(self, bucket: BucketId, version: int, data: bytes) -> None:
        held = self._held[bucket]
        nbytes, slot = held.bucket.nbytes, held.slot_of(version)
        if len(data) < nbytes:
            raise ValueError(f"{len(data)} bytes are no copy of bucket {bucket}, which has {nbytes}")
        with self._on_device():
            held.slots[slot].copy_(as_tensor(memoryview(bytearray(data[:nbytes])), torch_dtype(held.bucket.dtype)))
            if self._lane is not None:
                held.on_gpu[slot].copy_(held.slots[slot])
            held.optimizer.load(unpack(data[nbytes:], len(held.bucket.pieces)))

    def digest(self, bucket: BucketId, version: int) -> str:
        """Of a bucket that has just been made, on whichever thread finished it."""
        held = self._held[bucket]
        return digest_of(held.slots[held.slot_of(version)], held.optimizer.states())

    def spare_bytes(self, plan: Plan) -> int:
        """Where workers find the events and the twins of this server's GPU."""
        return 0 if self._lane is None else room_for_tables(plan)

    def memory(self) -> dict[str, int]:
        """The memory besides the slots, on the device that updates."""
        states = [part.state for held in self._held.values() for part in held.optimizer.parts]
        on_gpu = sum(one.nbytes for held in self._held.values() for one in set(held.on_gpu))
        return {
            "state of the optimizer": sum(value.nbytes for state in states for value in state.values()),
            "sums of gradients": self._crew.room_bytes + sum(sums.nbytes for sums in self._sums.values()),
            "parameters on the GPU": on_gpu,
        }

    def links_changed(self) -> None:
        """Unpin memory of workers' previous incarnations; what is still lent is pinned again when it is used."""
        if self._lane is not None:
            self._lane.let_go(self._slots)

    def close(self) -> None:
        """Release the GPU, and end the threads."""
        self._crew.close()
        if self._lane is not None:
            self._lane.close()

    def _apply(self, held: _Held, effect: Apply, given: list[Tensor], done: Done) -> None:
        old, new = held.slots[effect.from_slot], held.slots[effect.to_slot]
        if effect.step == INITIAL_STEP or (effect.values and given) or not given:
            if given or new is not old:
                new.copy_(given[0] if given else old)
            done(None)
        else:
            self._make_ready(held, effect)
            self._update(held, old, new, given, effect, done)

    def _make_ready(self, held: _Held, effect: Apply) -> None:
        if effect.without:
            held.optimizer.take_apart()
        if effect.rates:  # otherwise those that the optimizer was created with
            held.optimizer.set_rates(effect.rates[held.group])
        self.times.buckets += 1

    def _update(
        self,
        held: _Held,
        old: Tensor,
        new: Tensor,
        given: list[Tensor],
        effect: Apply,
        done: Done,
        kept: MeanRoom | None = None,
    ) -> None:
        if (sgd := held.optimizer.one_pass_sgd) is not None:
            clipping = Clipping.of(effect)
            next_version(sgd, old, new, given, effect.replicas, self._crew, self.times, done, clipping, kept)
        else:
            self._update_parts(held, old, new, given, effect, done, kept)

    def _update_parts(
        self,
        held: _Held,
        old: Tensor,
        new: Tensor,
        given: list[Tensor],
        effect: Apply,
        done: Done,
        kept: MeanRoom | None,
    ) -> None:
        """In host memory: each thread takes parts of the bucket, and does all that is to be done with them.

        What can be done for all parts is done before: threads share one interpreter, and wait for it."""
        optimizer, clipping, crew = held.optimizer, Clipping.of(effect), self._crew
        parts = optimizer.moving(effect.without)
        loans = optimizer.only_reads
        single = len(given) == effect.replicas == 1 and given[0].dtype == old.dtype and not clipping.changes
        is_mean = loans and single and kept is None
        moves = new is not old
        if moves and optimizer.is_apart:
            new.copy_(old)  # also what is between two pieces
        befores, afters = optimizer.cut(old, parts), optimizer.cut(new, parts)
        gradients = [optimizer.cut(one, parts) for one in given]
        means = None if kept is None else kept.in_pieces(optimizer.cut(kept.whole, parts))
        step = optimizer.begin_step(parts)
        copies = moves and not optimizer.is_apart

        def update(number: int, thread: int) -> None:
            began = time.perf_counter()
            values, mean = afters[number], gradients[0][number]
            if not is_mean:
                room = crew.room(thread, values.numel(), old.dtype)
                place = room if means is None else means[number]
                shares = [one[number] for one in gradients]
                mean = mean_of(shares, effect.replicas, place, may_be_loan=loans and kept is None, clipping=clipping)
            if kept is not None:
                kept.piece_is_written()
                mean = mean if loans else room.copy_(mean)
            reduced = time.perf_counter()
            if copies:
                values.copy_(befores[number])
            step(number, values, mean)
            if thread == 0:
                self.times.reduce += reduced - began
                self.times.update += time.perf_counter() - reduced

        crew.begin(len(parts), update, done)

    def _apply_on_gpu(self, lane: GpuStream, held: _Held, effect: Apply, given: list[Tensor]) -> None:
        """Queue everything on the lane's stream."""
        twins = () if lane.twins is None else lane.twins.slots()
        if twins and not held.in_twins:
            held.on_gpu, held.in_twins = _in_twins(held, twins), True
            held.optimizer.move_to(held.on_gpu[0])
        old, new = held.on_gpu[effect.from_slot], held.on_gpu[effect.to_slot]
        if effect.step == INITIAL_STEP or (effect.values and given):
            new.copy_(given[0], non_blocking=True)
        else:
            if new is not old:
                new.copy_(old)
            if given:
                self._make_ready(held, effect)
                self._update_on_gpu(held, new, given, effect)
        if lane.twins is None or lane.twins.host_is_read():
            held.slots[effect.to_slot].copy_(new, non_blocking=True)

    def _update_on_gpu(self, held: _Held, values: Tensor, given: list[Tensor], effect: Apply) -> None:
        began = time.perf_counter()
        clipping = Clipping.of(effect)
        mean = self._clipped_on_gpu(held, values, given, effect.replicas, clipping)
        reduced = time.perf_counter()
        parts = held.optimizer.moving(effect.without)
        step = held.optimizer.begin_step(parts)
        for number, part in enumerate(parts):
            step(number, values[part.where], mean[part.where])
        self.times.reduce += reduced - began
        self.times.update += time.perf_counter() - reduced

    def _clipped_on_gpu(
        self, held: _Held, values: Tensor, given: list[Tensor], replicas: int, clipping: Clipping
    ) -> Tensor:
        if clipping.scale == 1.0 or not _is_one_of_the_gpu(given, replicas, values.dtype):
            return clipping.clip(self._mean_on_gpu(held, values, given, replicas, lent=not clipping.changes))
        # One pass instead of two; a worker's own gradient stays as it is.
        room = self._room_for_sums(values, values.numel())
        return clipping.limited(torch.mul(given[0], clipping.scale, out=room))

    def _mean_on_gpu(self, held: _Held, values: Tensor, given: list[Tensor], replicas: int, *, lent: bool) -> Tensor:
        """``lent``: it may be a worker's own gradient, because nothing changes it."""
        first = given[0]
        if lent and _is_one_of_the_gpu(given, replicas, values.dtype) and held.optimizer.only_reads:
            return first  # read where the worker has it
        mean = self._room_for_sums(values, values.numel())
        if first.dtype != mean.dtype:
            # Widened on the GPU. torch would do that on the CPU, at once, and the gradient may still be on its way.
            first = first.to(self._device, non_blocking=True)
        mean.copy_(first, non_blocking=True)
        for gradient in given[1:]:
            mean.add_(gradient.to(self._device, non_blocking=True))
        if replicas > 1:
            mean.div_(replicas)
        return mean

    # -- the norm of a mean --

    def measure(self, effect: Measure, gradients: Sequence[memoryview], found: Found) -> None:
        held, lane = self._held[effect.bucket], self._lane
        given = [as_tensor(one, self._wire.dtype_of(held.bucket, one.nbytes)) for one in gradients]
        if not given:
            found(0.0, None)
        elif lane is None:
            dtype = held.slots[0].dtype
            begin_norm(given, effect.replicas, held.spans, dtype, effect.norm_type, self._crew, found)
        else:
            near = _nearest(given, lane.take(effect.bucket, gradients), effect.step)
            with lane.queueing():
                self._measure_on_gpu(lane, held, effect, near, found)

    def _measure_on_gpu(self, lane: GpuStream, held: _Held, effect: Measure, given: list[Tensor], found: Found) -> None:
        """Queue it: the norms of all buckets are then made in one turn of this process on the GPU."""
        mean = self._mean_on_gpu(held, held.on_gpu[0], given, effect.replicas, lent=True)
        norms = norms_of([mean[where] for where in held.optimizer.ranges()], effect.norm_type)
        there = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        there.copy_(norms, non_blocking=True)

        def done(error: Exception | None) -> None:
            found(combined(there.tolist() if error is None else (), effect.norm_type), error)

        lane.when_done(done)

    # -- checkpoints --

    def snapshot(self, version: int, buckets: Set[BucketId] | None = None) -> list[NamedTensor]:
        with self._on_device():
            saved = [held for bucket, held in self._held.items() if buckets is None or bucket in buckets]
            return self._snapshot(version, saved)

    def _snapshot(self, version: int, saved: Sequence[_Held]) -> list[NamedTensor]:
        tensors = []
        for held in saved:
            slot = held.slot_of(version)
            # Where there is a twin, its slot may not be filled.
            values = held.on_gpu[slot].to("cpu", copy=True) if held.in_twins else held.slots[slot].clone()
            pieces = zip(held.bucket.pieces, held.optimizer.ranges(), held.optimizer.states(), strict=True)
            for piece, where, state in pieces:
                name = self._names[piece.parameter]
                tensors.append(named(PieceName(VALUE, piece.first, "", name), values[where]))
                for key, value in state.items():
                    tensors.append(named(PieceName(STATE, piece.first, key, name), value.cpu()))
        return tensors

    def restore(self, folder: Path, shards: Sequence[str], slot: int) -> None:
        with self._on_device():
            self._restore(ShardFiles(folder, shards), slot)

    def _restore(self, files: ShardFiles, slot: int) -> None:
        for held in self._held.values():
            target = held.slots[slot]
            target.zero_()  # also what is between two pieces
            states = []
            for piece, where in zip(held.bucket.pieces, held.optimizer.ranges(), strict=True):
                name = self._names[piece.parameter]
                target[where] = files.value(name, piece.first, piece.elements, target.dtype)
                states.append(files.state(name, piece.first, piece.elements))
            if self._lane is not None:
                held.on_gpu[slot].copy_(target)
            held.optimizer.load(states)

    # -- a worker requests or sends the optimizer's state --

    def answer(self, what: str, data: bytes) -> bytes:
        if what not in (GET_STATE, PUT_STATE) or len(data) < STATE_HEADER.size:
            raise ValueError(f"servers do not answer requests for {what!r}")
        bucket, offset, total = STATE_HEADER.unpack_from(data)
        held = self._held.get(bucket)
        if held is None:
            raise ValueError(f"bucket {bucket} is not on this server")
        with self._on_device():
            if what == PUT_STATE:
                return self._put_state(held, offset, total, data[STATE_HEADER.size :])
            packed = pack(held.optimizer.states())
        return STATE_HEADER.pack(bucket, offset, len(packed)) + packed[offset : offset + STATE_CHUNK]

    def _put_state(self, held: _Held, offset: int, total: int, chunk: bytes) -> bytes:
        room = _STATE_PER_PIECE * (1 + len(held.bucket.pieces)) + _STATE_PER_ELEMENT * held.slots[0].numel()
        if total > room:
            raise ValueError(
                f"{total} bytes are no optimizer state of bucket {held.bucket.id}, which has at most {room}"
            )
        incoming = self._incoming.setdefault(held.bucket.id, bytearray())
        if len(incoming) < offset or offset + len(chunk) > total:
            raise ValueError(f"a part of bucket {held.bucket.id}'s optimizer state arrived out of order")
        incoming[offset:] = chunk
        if len(incoming) == total:
            del self._incoming[held.bucket.id]
            held.optimizer.load(unpack(bytes(incoming), len(held.bucket.pieces)))
        return b""

    def _room_for_sums(self, like: Tensor, elements: int) -> Tensor:
        known = self._sums.get(like.dtype)
        if known is None or known.numel() < elements:
            known = self._sums[like.dtype] = torch.empty(elements, dtype=like.dtype, device=like.device)
        return known[:elements]


def _nearest(given: list[Tensor], taken: TakenGradients, step: Step) -> list[Tensor]:
    """Gradients where the GPU finds them. The first parameters are always in host memory, in full."""
    if step == INITIAL_STEP:
        return given
    return [one if twin is None else twin.view(one.dtype) for one, twin in zip(given, taken.on_gpu, strict=True)]


def _is_one_of_the_gpu(given: Sequence[Tensor], replicas: int, dtype: torch.dtype) -> bool:
    """Whether this is a single gradient that is its own mean, and on the GPU."""
    return len(given) == replicas == 1 and given[0].is_cuda and given[0].dtype == dtype


def _in_twins(held: _Held, twins: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This bucket in the slots' twins, each with its newest version."""
    where = slice(held.bucket.shard_offset, held.bucket.shard_offset + held.bucket.nbytes)
    moved = tuple(twin[where].view(held.slots[0].dtype) for twin in twins)
    for one in moved:
        one.copy_(held.on_gpu[0])
    return moved
