"""A server's shard in torch: reduces the workers' gradients, and the optimizer makes the next version.

The optimizer is the named class of torch.optim, one instance per bucket, on the flat bucket: its kernels work element
by element, so packing parameters changes nothing but the number of calls. A version is made out of place: the old one
is copied into the other slot first, and the optimizer works there (plain SGD on a CPU needs no copy: ``sgd.py``).
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lockstep.foreign import plain, read_json
from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId
from lockstep.protocol.core.messages import Layout, OptimizerEntry
from lockstep.protocol.core.plan import Bucket, Plan
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.task.store import Done, StoreTimes
from lockstep.training.gpu.gpu_stream import GpuStream
from lockstep.training.gpu.shared_events import spare_bytes
from lockstep.training.server.bare_optimizer import keep_compiler_out, step
from lockstep.training.server.optimizer_state import PieceState, pack, put_together, take_apart, unpack
from lockstep.training.server.piece_pool import PiecePool
from lockstep.training.server.rates import set_numbers
from lockstep.training.server.sgd import is_plain_sgd, mean_of, next_version, scratch_elements
from lockstep.training.server.shard_file import STATE, VALUE, PieceName, ShardFiles, named
from lockstep.training.tensors import as_tensor, torch_dtype
from lockstep.training.wire_format import WireFormat

ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)
"""The classes of torch.optim that servers run: those that work element by element."""
_MAX_OPTIONS_BYTES = 64 << 10

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
    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    group: int
    entry: OptimizerEntry
    bucket: Bucket
    apart: list[torch.optim.Optimizer] = field(default_factory=list)
    """One optimizer per piece, once the pieces are no longer updated together."""

    @property
    def only_reads(self) -> bool:
        """Whether the optimizer leaves its gradient unchanged, so that a loan may serve as the gradient."""
        return bool(self.optimizer.param_groups[0].get("fused"))

    def ranges(self) -> list[slice]:
        size = self.parameter.element_size()
        return [slice(p.offset // size, p.offset // size + p.elements) for p in self.bucket.pieces]


def make_optimizer(entry: OptimizerEntry, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of a parameter group, over one flat tensor; ValueError for one that servers do not run.

    Its name comes from another task: no other function of torch.optim, or of a module in it, may be called by name.
    """
    if entry.kind not in ELEMENTWISE:
        raise ValueError(f"servers do not run {plain(entry.kind, 100)!r}, only {', '.join(sorted(ELEMENTWISE))}")
    options = optimizer_options(entry)
    try:
        made = getattr(torch.optim, entry.kind)([parameter], **options)
    except TypeError as error:  # a name that it does not have, or a number where it takes several
        raise ValueError(f"{entry.kind} does not take these settings: {plain(str(error), 200)}") from error
    assert isinstance(made, torch.optim.Optimizer)
    return made


def warm_up() -> None:
    """Import now what torch imports with its first optimizer; otherwise the first bucket would wait for it."""
    keep_compiler_out()
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.grad = torch.zeros(1)
    step(make_optimizer(OptimizerEntry("SGD", '{"lr": 0.0}'), parameter))


def optimizer_options(entry: OptimizerEntry) -> dict[str, object]:
    """The plain settings of a group as the class of torch.optim takes them; ValueError for any other."""
    options = read_json(entry.options, _MAX_OPTIONS_BYTES)
    if not isinstance(options, dict) or not all(map(_is_plain, options.values())):
        raise ValueError(f"the settings of {plain(entry.kind, 100)} are not plain numbers")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _is_plain(value: object) -> bool:
    """A number, or a few of them: nothing that an optimizer would take for a tensor, a name or a list of parameters."""
    if isinstance(value, list):
        return all(isinstance(one, int | float) for one in value)
    return value is None or isinstance(value, int | float)


class TorchShardStore:
    """Implements ``runtime.task.store.ShardStore``; all its calls come on one thread."""

    def __init__(self, device: torch.device | None = None, wire: WireFormat | None = None, helpers: int = 0) -> None:
        """``device``: where reduction and update run; the CPU by default. ``wire``: the format in which gradients
        arrive. ``helpers``: threads that take part in updates on a CPU."""
        self._wire = wire or WireFormat()
        self._device = device or torch.device("cpu")
        self._lane = GpuStream(self._device) if self._device.type == "cuda" else None
        self._crew = PiecePool(helpers)
        self._held: dict[BucketId, _Held] = {}
        self._incoming: dict[BucketId, bytearray] = {}
        self._names: tuple[str, ...] = ()
        self._slots: list[memoryview] = []
        self._sums: dict[torch.dtype, Tensor] = {}
        """Where gradients are summed: one place for all buckets, which are updated one by one. It stays in the
        cache, and the optimizer reads it there."""
        self.times = StoreTimes()

    def prepare(self, layout: Layout, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:
        self._names = tuple(entry.name for entry in plan.parameters)
        if self._lane is not None:
            self._slots = list(slots)
            pinned = [self._lane.pinned.pin(slot) for slot in slots]
            if all(pinned):
                self._lane.share(plan, server, slots)
        with self._on_device():
            for bucket in plan.buckets_of(server):
                self._held[bucket.id] = self._hold(bucket, layout.optimizers[bucket.group], slots)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """What is computed inside comes after all updates begun before, and is done when the block ends."""
        if self._lane is None:
            yield
            return
        self._lane.finish()  # the slots are host memory, which is read and written synchronously
        with self._lane.queueing():
            yield
        self._lane.finish()

    def _hold(self, bucket: Bucket, entry: OptimizerEntry, slots: Sequence[memoryview]) -> _Held:
        dtype = torch_dtype(bucket.dtype)
        where = slice(bucket.shard_offset, bucket.shard_offset + bucket.nbytes)
        tensors = tuple(as_tensor(slot[where], dtype) for slot in slots)
        first = tensors[0]
        value = first if self._device.type == "cpu" else torch.zeros_like(first, device=self._device)
        parameter = torch.nn.Parameter(value, requires_grad=False)
        optimizer = make_optimizer(entry, parameter)
        if self._lane is not None or not is_plain_sgd(optimizer):
            self._room_for_sums(parameter, value.numel())
        return _Held(tensors, parameter, optimizer, bucket.group, entry, bucket)

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        if self._lane is None:
            self._apply(effect, gradients)
            done(None)
            return
        readers_wait = self._lane.take(effect.bucket, gradients)
        with self._lane.queueing():
            self._apply(effect, gradients)
            self._lane.hand_on(effect.bucket, done, at_once=readers_wait)

    def spare_bytes(self, plan: Plan) -> int:
        """Where workers find the events of this server's GPU."""
        return 0 if self._lane is None else spare_bytes(len(plan.buckets))

    def memory(self) -> dict[str, int]:
        """The memory besides the slots, on the device that updates."""
        states = [o.state.values() for held in self._held.values() for o in (held.optimizer, *held.apart)]
        tensors = [value for found in states for state in found for value in state.values()]
        on_gpu = sum(held.parameter.nbytes for held in self._held.values()) if self._lane is not None else 0
        return {
            "state of the optimizer": sum(value.nbytes for value in tensors if isinstance(value, Tensor)),
            "sums of gradients": sum(sums.nbytes for sums in self._sums.values()),
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

    def _apply(self, effect: Apply, gradients: Sequence[memoryview]) -> None:
        held = self._held[effect.bucket]
        old, new = held.slots[effect.from_slot], held.slots[effect.to_slot]
        given = [as_tensor(one, self._wire.dtype_of(held.bucket, one.nbytes)) for one in gradients]
        if self._lane is not None and (effect.step == INITIAL_STEP or effect.values or not given):
            self._lane.finish()  # the CPU copies, and must not overtake the GPU
        if effect.step == INITIAL_STEP or (effect.values and given):
            new.copy_(given[0])
            held.parameter.data.copy_(new, non_blocking=True)
        elif not given:
            new.copy_(old)
        elif self._lane is None and not effect.without and not held.apart and is_plain_sgd(held.optimizer):
            if effect.rates:
                set_numbers(held.optimizer.param_groups[0], effect.rates[held.group])
            sums = self._room_for_sums(old, scratch_elements(old, self._crew))
            next_version(held.optimizer, old, new, given, effect.replicas, sums, self._crew, self.times)
            held.parameter.data = new
            self.times.buckets += 1
        else:
            began = time.perf_counter()
            held.parameter.grad = self._reduce(held, given, effect.replicas)
            reduced = time.perf_counter()
            if effect.without and not held.apart:
                _take_bucket_apart(held)
            if held.apart:
                self._step_apart(held, old, new, effect)
            else:
                if effect.rates:  # otherwise those that the optimizer was created with
                    set_numbers(held.optimizer.param_groups[0], effect.rates[held.group])
                self._step(held, old, new)
            held.parameter.grad = None  # it may be a loan, which ends here
            self.times.reduce += reduced - began
            self.times.update += time.perf_counter() - reduced
            self.times.buckets += 1

    def _step(self, held: _Held, old: Tensor, new: Tensor) -> None:
        if self._device.type == "cpu":
            new.copy_(old)
            held.parameter.data = new
            step(held.optimizer)
        else:
            step(held.optimizer)
            new.copy_(held.parameter.data, non_blocking=True)

    def _step_apart(self, held: _Held, old: Tensor, new: Tensor, effect: Apply) -> None:
        """Each piece separately; those without a gradient stay as they are, like a parameter whose grad is None."""
        on_host = self._device.type == "cpu"
        if on_host:
            new.copy_(old)
        target = new if on_host else held.parameter.data
        assert held.parameter.grad is not None
        for piece, where, optimizer in zip(held.bucket.pieces, held.ranges(), held.apart, strict=True):
            if piece.parameter in effect.without:
                continue
            group = optimizer.param_groups[0]
            if effect.rates:
                set_numbers(group, effect.rates[held.group])
            group["params"][0].data = target[where]
            group["params"][0].grad = held.parameter.grad[where]
            step(optimizer)
        if not on_host:
            new.copy_(target, non_blocking=True)

    # -- checkpoints --

    def snapshot(self, version: int) -> list[NamedTensor]:
        with self._on_device():
            return self._snapshot(version)

    def _snapshot(self, version: int) -> list[NamedTensor]:
        tensors = []
        for held in self._held.values():
            values = held.slots[version % 2].clone()
            pieces = zip(held.bucket.pieces, held.ranges(), _states_of(held), strict=True)
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
            for piece, where in zip(held.bucket.pieces, held.ranges(), strict=True):
                name = self._names[piece.parameter]
                target[where] = files.value(name, piece.first, piece.elements, target.dtype)
                states.append(files.state(name, piece.first, piece.elements))
            held.parameter.data.copy_(target)
            _load_states(held, states)

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
            packed = pack(_states_of(held))
        return STATE_HEADER.pack(bucket, offset, len(packed)) + packed[offset : offset + STATE_CHUNK]

    def _put_state(self, held: _Held, offset: int, total: int, chunk: bytes) -> bytes:
        room = _STATE_PER_PIECE * (1 + len(held.bucket.pieces)) + _STATE_PER_ELEMENT * held.parameter.numel()
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
            _load_states(held, unpack(bytes(incoming), len(held.bucket.pieces)))
        return b""

    def _room_for_sums(self, like: Tensor, elements: int) -> Tensor:
        known = self._sums.get(like.dtype)
        if known is None or known.numel() < elements:
            known = self._sums[like.dtype] = torch.empty(elements, dtype=like.dtype, device=like.device)
        return known[:elements]

    def _reduce(self, held: _Held, given: list[Tensor], count: int) -> Tensor:
        total = self._room_for_sums(held.parameter, held.parameter.numel())
        if self._lane is None:
            return mean_of(given, count, total, may_be_loan=held.only_reads)
        total.copy_(given[0], non_blocking=True)
        for gradient in given[1:]:
            total.add_(gradient.to(self._device, non_blocking=True))
        return total.div_(count) if count > 1 else total


def _states_of(held: _Held) -> list[PieceState]:
    if not held.apart:
        return take_apart(held.optimizer.state[held.parameter], held.parameter.numel(), held.ranges())
    states = []
    for optimizer in held.apart:
        parameter = optimizer.param_groups[0]["params"][0]
        states += take_apart(optimizer.state[parameter], parameter.numel(), [slice(None)])
    return states


def _take_bucket_apart(held: _Held) -> None:
    _set_apart(held, _states_of(held))


def _set_apart(held: _Held, states: Sequence[PieceState]) -> None:
    held.apart = []
    for where, state in zip(held.ranges(), states, strict=True):
        parameter = torch.nn.Parameter(held.parameter.data[where], requires_grad=False)
        optimizer = make_optimizer(held.entry, parameter)
        optimizer.state[parameter] = dict(state)
        held.apart.append(optimizer)
    held.optimizer.state.clear()


def _load_states(held: _Held, states: Sequence[PieceState]) -> None:
    device = held.parameter.device
    # Fused optimizers count their steps on their device, the others on the CPU.
    placed = [{n: v.to(device) if v.dim() or held.only_reads else v for n, v in state.items()} for state in states]
    whole = put_together(placed, held.parameter.numel(), held.ranges())
    if whole is None:
        _set_apart(held, placed)
    else:
        held.apart = []
        held.optimizer.state[held.parameter] = dict(whole)
