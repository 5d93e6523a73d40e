"""Gradients on their way from the model into the buckets that carry them.

A short hook per parameter adds a gradient as soon as backward has made it. A bucket whose gradients are all there can
be copied into the arena by one call and handed over, while backward goes on. When a gradient is final is decided by
those who call: ``replica.py`` and ``sealed_replica.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.protocol.core.ids import BucketId, Step
from lockstep.protocol.core.plan import Piece
from lockstep.training.tensors import torch_dtype
from lockstep.training.torch_private import foreach_copy_
from lockstep.training.worker.binding import Binding, Bound

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class FillingPart:
    """What one parameter has in one bucket."""

    bound: Bound
    place: Tensor
    """Its memory in the arena."""
    first: int | None
    """Its first element, if the parameter is cut into several buckets."""

    def of(self, gradient: Tensor) -> Tensor:
        """This part of the parameter's gradient."""
        if self.first is None:
            return gradient
        return gradient.reshape(-1)[self.first : self.first + self.place.numel()]


@dataclass(slots=True, eq=False)
class Filling:
    """One bucket in the current step."""

    id: BucketId
    parts: tuple[FillingPart, ...]
    numbers: Tensor
    """All of it in the arena, in its own type."""
    lacking: int
    filled_in: Step = -1
    """The latest step in which it was handed over."""
    waiting: list[tuple[FillingPart, Tensor]] = field(default_factory=list)
    """Whole gradients of which its parts are copied next."""

    def lacks_all(self) -> bool:
        return self.lacking == len(self.parts)

    def without(self, missing: Collection[int]) -> list[FillingPart]:
        """The parts of these parameters."""
        return [part for part in self.parts if part.bound.index in missing]


class Fillings:
    """The buckets of one worker."""

    def __init__(self, binding: Binding, on_gradient: Callable[[Bound], None]) -> None:
        """``on_gradient``: autograd has put something into this parameter's ``grad``."""
        self.step: Step = -1
        self._memory = binding.memory
        self._parts: list[list[tuple[Filling, FillingPart]]] = [[] for _ in binding.bound]
        self._got_in: list[Step] = [-1] * len(binding.bound)
        """By parameter: the step of its latest gradient."""
        self.buckets = [self._filling(binding, bucket.id) for bucket in binding.plan.buckets]
        # A frozen parameter cannot have a hook; if it is unfrozen later, its gradient is taken at the seal.
        hooked = [bound for bound in binding.bound if bound.trained.parameter.requires_grad]
        self._handles = [_hook(bound, on_gradient) for bound in hooked]

    def _filling(self, binding: Binding, bucket: BucketId) -> Filling:
        known = binding.plan.buckets[bucket]
        numbers = binding.memory.gradients[known.arena_offset : known.arena_offset + known.nbytes]
        parts = tuple(_part(binding.bound[piece.parameter], piece) for piece in known.pieces)
        filling = Filling(bucket, parts, numbers.view(torch_dtype(known.dtype)), len(parts))
        for part in parts:
            self._parts[part.bound.index].append((filling, part))
        return filling

    def begin(self, step: Step) -> None:
        """The gradients of this step come next."""
        self.step = step
        for filling in self.buckets:
            filling.lacking = len(filling.parts)
            filling.waiting.clear()

    # -- during backward --

    def has(self, bound: Bound) -> bool:
        """Whether this parameter's gradient of the current step was added."""
        return self._got_in[bound.index] == self.step

    def add(self, bound: Bound, gradient: Tensor) -> list[Filling]:
        """This gradient is there. Returns the buckets that are complete with it."""
        for filling, part in self._parts[bound.index]:
            filling.waiting.append((part, gradient))
        return self.written(bound)

    def written(self, bound: Bound) -> list[Filling]:
        """As ``add``, of a gradient that is in the arena already."""
        self._got_in[bound.index] = self.step
        fillings = [filling for filling, _ in self._parts[bound.index]]
        for filling in fillings:
            filling.lacking -= 1
        return [filling for filling in fillings if not filling.lacking]

    def fill(self, filling: Filling) -> None:
        """Copy what waits into the arena, and hand the bucket over."""
        _copy(filling.waiting)
        filling.waiting.clear()
        filling.filled_in = self.step
        self._memory.filled(self.step, filling.id)

    def fill_together(self, fillings: Sequence[Filling]) -> None:
        """As ``fill`` of each, with one copy of them all."""
        _copy([waiting for filling in fillings for waiting in filling.waiting])
        for filling in fillings:
            filling.waiting.clear()
            self.fill(filling)

    # -- when backward has ended --

    def is_sent(self, filling: Filling) -> bool:
        """Whether this bucket was handed over in the current step."""
        return filling.filled_in == self.step

    def close_unfilled(self) -> tuple[BucketId, ...]:
        """Buckets that backward did not fill: without any gradient they are absent; otherwise the rest is zero."""
        unfilled = [filling for filling in self.buckets if not self.is_sent(filling)]
        for filling in unfilled:
            if not filling.lacks_all():
                _zero([part for part in filling.parts if not self.has(part.bound)])
                self.fill(filling)
        return tuple(filling.id for filling in unfilled if filling.lacks_all())

    def take(self, filling: Filling, missing: Collection[int]) -> None:
        """Let wait what the model's parameters have in ``grad`` now; the missing ones count as zero."""
        gradients = [(part, part.bound.trained.parameter.grad) for part in filling.parts]
        _zero(filling.without(missing))
        filling.waiting = [(p, given) for p, given in gradients if given is not None and p.bound.index not in missing]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def edited(fillings: Sequence[Filling]) -> list[Filling]:
    """Those of these buckets whose bits in the arena are not those that the model's gradients have now.

    As integers: a NaN is equal to itself, and 0 is not -0.
    """
    if not any(filling.numbers.is_cuda for filling in fillings):
        return [one for one in fillings if not all(torch.equal(*both) for both in _bits(one))]
    # Fetched together, so that there is one wait for the GPU, and few calls for each bucket.
    pairs = [list(zip(*_bits(one), strict=True)) for one in fillings]
    differ = torch.stack([(torch.cat(now) != torch.cat(sent)).any() for now, sent in pairs]).tolist()
    return [one for one, was_edited in zip(fillings, differ, strict=True) if was_edited]


def _bits(filling: Filling) -> list[tuple[Tensor, Tensor]]:
    """Every gradient and its copy in the arena, flat, as integers."""
    found = []
    for part in filling.parts:
        gradient = part.bound.trained.parameter.grad
        assert gradient is not None
        now = part.of(gradient.detach()).to(part.place.dtype).reshape(-1)
        wide = now.nbytes % 8 == 0 and now.storage_offset() * now.element_size() % 8 == 0
        bits = torch.int64 if wide else _BITS[now.element_size()]  # wide ones are compared twice as fast
        found.append((now.view(bits), part.place.view(-1).view(bits)))
    return found


def _hook(bound: Bound, on_gradient: Callable[[Bound], None]) -> RemovableHandle:
    handle: RemovableHandle = bound.trained.parameter.register_post_accumulate_grad_hook(lambda _: on_gradient(bound))
    return handle


def _part(bound: Bound, piece: Piece) -> FillingPart:
    if len(bound.buckets) == 1:
        return FillingPart(bound, bound.gradient, None)
    return FillingPart(bound, bound.gradient.view(-1)[piece.first : piece.first + piece.elements], piece.first)


def _zero(parts: Sequence[FillingPart]) -> None:
    for part in parts:
        part.place.zero_()


def _copy(given: Sequence[tuple[FillingPart, Tensor]]) -> None:
    """Copy gradients to their places."""
    pairs = [(part.place, part.of(gradient)) for part, gradient in given]
    with torch.no_grad():
        if pairs and pairs[0][0].is_cuda:
            # As flat rows, all of them are copied by one kernel; one of another shape would be one kernel for each.
            flat = [(place.view(-1), source.view(-1)) for place, source in pairs if source.is_contiguous()]
            for place, source in pairs:
                if not source.is_contiguous():
                    place.copy_(source)
            pairs = flat
        if pairs:
            foreach_copy_([place for place, _ in pairs], [source for _, source in pairs])
