"""The optimizer of one bucket: the same class of torch.optim on each of its parts.

A bucket in host memory is cut into parts that stay in a core's cache, so that its reduction, its copy and all passes of
its optimizer read memory once, and several threads can take parts at the same time. The kernels work element by
element: the cuts change nothing in the result. A bucket on a GPU is one part.

All parts are updated together until some parameters of the bucket get no gradient in a step. Those must keep their
state, and their own count of steps; so from then on no part has elements of two parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.protocol.core.plan import PAGE, Bucket
from lockstep.training.server.bare_optimizer import step
from lockstep.training.server.fused_adam import AdamSteps, is_decoupled, is_fused_adam
from lockstep.training.server.named_optimizer import make_optimizer
from lockstep.training.server.optimizer_state import PieceState, put_together, take_apart
from lockstep.training.server.rates import set_numbers
from lockstep.training.server.sgd import is_plain_sgd

_PART_BYTES = 1 << 20
"""Most optimizers make a dozen passes: with old and new values, gradient and state, this is what a cache keeps."""
_FUSED_PART_BYTES = 4 << 20
"""One pass needs less of a cache. With 16 threads each part costs about 0.1 ms of the interpreter, whatever its size:
in parts of 1 MiB this, and not memory, decides how long a step of a large model takes."""
_LEAST_PART_BYTES = 256 << 10
"""Smaller parts would cost more in calls than another thread saves."""


def part_bytes(shard_bytes: int, threads: int, *, fused: bool) -> int:
    """The size of the parts of a shard's buckets: whole pages, and enough for all threads if the shard is large enough.
    A bucket alone need not have enough: a thread that is through with one goes on with the next, and waits for no
    other."""
    fair = shard_bytes // threads
    wanted = min(max(fair, _LEAST_PART_BYTES), _FUSED_PART_BYTES if fused else _PART_BYTES)
    return -(-wanted // PAGE) * PAGE


MakeStep = Callable[[int, Tensor, Tensor], None]
"""Called with the place of a part among those that make a step, its values and its gradient."""


@dataclass(slots=True)
class BucketPart:
    """Some neighbouring elements of a bucket, and their optimizer."""

    where: slice
    piece: int | None
    """The piece of the plan that it belongs to, once parameters may be updated separately."""
    optimizer: torch.optim.Optimizer

    def step(self, values: Tensor, gradient: Tensor) -> None:
        """Update these values in place. The gradient may be a loan, and is not kept."""
        parameter = self.parameter
        parameter.data = values
        parameter.grad = gradient
        step(self.optimizer)
        parameter.grad = None

    @property
    def parameter(self) -> Tensor:
        found = self.optimizer.param_groups[0]["params"][0]
        assert isinstance(found, Tensor)
        return found

    @property
    def state(self) -> dict[str, Tensor]:
        """What torch keeps for it besides the values."""
        known = dict(self.optimizer.state.get(self.parameter, {}))  # a copy: other threads ask for its size
        return {name: value for name, value in known.items() if isinstance(value, Tensor)}

    @state.setter
    def state(self, state: PieceState) -> None:
        self.optimizer.state[self.parameter] = dict(state)


class BucketOptimizer:
    """Makes the steps of one bucket, and gives and takes its state parameter by parameter."""

    def __init__(
        self, entry: OptimizerEntry, bucket: Bucket, values: Tensor, threads: int, shard_bytes: int = 0
    ) -> None:
        """``values``: the bucket's elements, on the device that updates them. ``threads``: how many take its parts, and
        those of the other buckets of a shard with so many bytes."""
        self._entry = entry
        self._bucket = bucket
        self._values = values
        self._rates: GroupRates | None = None
        sample = self._make(slice(0, 0)).optimizer
        group = sample.param_groups[0]
        self.only_reads = bool(group.get("fused"))
        """Whether it leaves its gradient unchanged, so that a loan may serve as the gradient."""
        self._is_plain_sgd = is_plain_sgd(sample)
        whole = values.is_cuda or self._is_plain_sgd
        whole_shard = max(shard_bytes, values.nbytes)
        nbytes = part_bytes(whole_shard, threads, fused=self.only_reads) * torch.get_num_threads()
        self._most = max(1, values.numel()) if whole else nbytes // values.element_size()
        self.parts = self._parts([(slice(0, values.numel()), None)])

    @property
    def is_apart(self) -> bool:
        """Whether each parameter of the bucket has its own state."""
        return self.parts[0].piece is not None

    @property
    def one_pass_sgd(self) -> torch.optim.Optimizer | None:
        """The optimizer of the whole bucket, if ``sgd.next_version`` may do its work."""
        return self.parts[0].optimizer if self._is_plain_sgd and not self.is_apart else None

    def move_to(self, values: Tensor) -> None:
        """The bucket's elements are there from now on."""
        self._values = values
        for part in self.parts:
            part.parameter.data = values[part.where]

    def ranges(self) -> list[slice]:
        """Where each piece of the plan is, in elements."""
        size = self._values.element_size()
        return [slice(p.offset // size, p.offset // size + p.elements) for p in self._bucket.pieces]

    def set_rates(self, rates: GroupRates) -> None:
        """The numbers of the next step."""
        if rates == self._rates:
            return
        for part in self.parts:
            set_numbers(part.optimizer.param_groups[0], rates)
        self._rates = rates

    def moving(self, without: Collection[int]) -> list[BucketPart]:
        """The parts whose parameters get a gradient in this step; of the others ``grad`` is None."""
        pieces = self._bucket.pieces
        return [one for one in self.parts if one.piece is None or pieces[one.piece].parameter not in without]

    def cut(self, whole: Tensor, parts: Sequence[BucketPart]) -> Sequence[Tensor]:
        """What these parts have of the bucket's elements."""
        return [whole[part.where] for part in parts] if self.is_apart else whole.split(self._most)

    def begin_step(self, parts: Sequence[BucketPart]) -> MakeStep:
        """What makes the next step of each of these parts, on any thread."""
        optimizer = self.parts[0].optimizer
        states = [part.optimizer.state.get(part.parameter) for part in parts] if is_fused_adam(optimizer) else []
        known = [state for state in states if state]
        if known and len(known) == len(parts):
            return AdamSteps(optimizer.param_groups[0], known, decoupled=is_decoupled(optimizer)).make
        return lambda number, values, gradient: parts[number].step(values, gradient)

    def take_apart(self) -> None:
        """From now on each parameter may be updated without the others."""
        if not self.is_apart:
            self._set_apart(self.states())

    def states(self) -> list[PieceState]:
        """A copy of the state of each piece of the plan."""
        return [
            _gathered(self._parts_of(piece) if self.is_apart else self.parts, where)
            for piece, where in enumerate(self.ranges())
        ]

    def load(self, states: Sequence[PieceState]) -> None:
        """Continue with these states, one per piece of the plan."""
        device, elements = self._values.device, self._values.numel()
        # Fused optimizers count their steps on their device, the others on the CPU.
        placed = [{n: v.to(device) if v.dim() or self.only_reads else v for n, v in s.items()} for s in states]
        whole = put_together(placed, elements, self.ranges())
        if whole is None:
            self._set_apart(placed)
            return
        self.parts = self._parts([(slice(0, elements), None)])
        _give(self.parts, whole, slice(0, elements))

    def _set_apart(self, states: Sequence[PieceState]) -> None:
        ranges = self.ranges()
        self.parts = self._parts([(where, piece) for piece, where in enumerate(ranges)])
        for piece, (where, state) in enumerate(zip(ranges, states, strict=True)):
            _give(self._parts_of(piece), state, where)

    def _parts_of(self, piece: int) -> list[BucketPart]:
        return [part for part in self.parts if part.piece == piece]

    def _parts(self, ranges: Sequence[tuple[slice, int | None]]) -> list[BucketPart]:
        """New parts, without state, that cover these ranges."""
        made = []
        for where, piece in ranges:
            for first in range(where.start, max(where.stop, where.start + 1), self._most):
                made.append(self._make(slice(first, min(first + self._most, where.stop)), piece))
        if self._rates is not None:
            for part in made:
                set_numbers(part.optimizer.param_groups[0], self._rates)
        return made

    def _make(self, where: slice, piece: int | None = None) -> BucketPart:
        parameter = torch.nn.Parameter(self._values[where], requires_grad=False)
        return BucketPart(where, piece, make_optimizer(self._entry, parameter))


def _gathered(parts: Sequence[BucketPart], where: slice) -> PieceState:
    """A copy of the state of these elements; the parts that have them were updated together, so their counts agree."""
    having = [part for part in parts if part.where.start < where.stop and where.start < part.where.stop] or parts[:1]
    states = [part.state for part in having]
    gathered: PieceState = {}
    for name, value in states[0].items():
        if not value.dim():
            gathered[name] = value.clone()
            continue
        overlaps = [
            state[name][max(where.start - part.where.start, 0) : max(where.stop - part.where.start, 0)]
            for part, state in zip(having, states, strict=True)
        ]
        gathered[name] = torch.cat(overlaps)
    return gathered


def _give(parts: Sequence[BucketPart], state: PieceState, where: slice) -> None:
    """The state of this range to the parts that cover it, as copies."""
    local = [slice(part.where.start - where.start, part.where.stop - where.start) for part in parts]
    for part, own in zip(parts, take_apart(state, where.stop - where.start, local), strict=True):
        part.state = own
