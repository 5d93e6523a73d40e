"""One rank's model where every rank trains: backward fills buckets, and when it ends the mean is in ``grad``.

As with DistributedDataParallel, nothing else changes for the program: it may clip, scale, accumulate, and use any
optimizer. A step is one backward pass that is averaged. During the first one nothing is handed over before its end,
because only then it is known how often each parameter's gradient is made in one pass: more than once where activation
checkpointing recomputes a layer that is used twice. From then on a bucket is handed over as soon as it is complete and
all before it are, in the same order on every rank.

The gradient itself is moved into the averager's memory as soon as it is final, and stays there: ``grad`` is a view, as
with DDP's ``gradient_as_bucket_view``. So no second copy of the gradients is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.protocol.core.ids import BucketId, Step
from lockstep.training.digests import digests_of
from lockstep.training.ranks.averager import Averager
from lockstep.training.ranks.layout import LOOPS, RankLayout, buffer_views, gradient_view
from lockstep.training.ranks.sparse import gathered, lacks_all, spread
from lockstep.training.tensors import is_in, parameter_offsets, torch_dtype
from lockstep.training.torch_private import at_end_of_backward, current_autograd_node, foreach_copy_
from lockstep.training.worker.binding import Trained

COMPARE_EVERY = 50
"""Steps between two comparisons of the parameters of all ranks; one more is made after the first update."""


UNKNOWN_PLACE = -1
LoopNumbers = tuple[int, int]
"""Which loop, and at which iteration."""
_DIGESTS = 1 + 2 * LOOPS
"""Where the sheet has them."""


class GradientMisuse(Exception):  # noqa: N818 - reads as the fact it states
    """A backward pass that cannot be averaged; the text names the parameter, and what to do instead."""


@dataclass(slots=True, eq=False)
class _Place:
    """One parameter and its places in the averager's memory."""

    trained: Trained
    leaving: Tensor
    """Where its gradient is handed over from."""
    mean: Tensor
    """Where the mean of all ranks arrives."""
    buckets: tuple[BucketId, ...]
    expected: int = 0
    """How often a backward pass makes its gradient; 0: not known yet, or never."""
    made: int = 0
    """How often this one has."""
    ready: bool = False
    sparse_dims: int = 0
    """Of its gradient, if that is sparse; 0: it is dense."""


class RankReplica:
    """The model of one rank."""

    def __init__(
        self,
        averager: Averager,
        layout: RankLayout,
        *,
        synchronises: Callable[[], bool] = lambda: True,
        on_step: Callable[[Step], None] = lambda _step: None,
        ends_itself: bool = True,
        place: Callable[[], int] = lambda: UNKNOWN_PLACE,
        on_elsewhere: Callable[[Step, int, int], None] = lambda _step, _mine, _chiefs: None,
        loops: Callable[[], Sequence[LoopNumbers]] = tuple,
        on_loops: Callable[[Step, Sequence[LoopNumbers], Sequence[LoopNumbers]], None] = lambda _step, _mine, _: None,
    ) -> None:
        """``synchronises``: whether the backward pass that begins is to be averaged. ``on_step`` is called when the
        means of a step are in ``grad``. ``ends_itself``: with the end of a backward pass, not with ``end_backward``.
        ``place``: where the program is, as a number that all ranks must have in one step; ``on_elsewhere`` is called
        with this rank's and the chief's if they differ. ``loops``: where it is in loops of its own; ``on_loops`` is
        called with this rank's and the chief's, wherever they are."""
        self.step: Step = 0
        """The number of backward passes that have been averaged."""
        self.unshared = False
        """The newest backward pass was not averaged: ``grad`` is this rank's own."""
        self._averager = averager
        self._layout = layout
        self._synchronises = synchronises
        self._on_step = on_step
        self._ends_itself = ends_itself
        self._place = place
        self._on_elsewhere = on_elsewhere
        self._loops = loops
        self._on_loops = on_loops
        self._stands = UNKNOWN_PLACE
        self._turns: Sequence[LoopNumbers] = ()
        """What ``place`` and ``loops`` said of the current step."""
        self._places = self._find_places()
        self._members = self._find_members()
        self._lacking = [0] * len(self._members)
        self._next: BucketId = 0
        """The first bucket that has not been handed over."""
        self._running = False
        self._skipping = False
        """This backward pass is not averaged."""
        self._known = False
        self._digests = [-1]
        """The step in which this rank last made digests of its parameters, and they."""
        self._handles = [self._hook(place) for place in self._places]
        self._buffers_leaving = self._buffer_views(averager.gradients)
        self._buffers_arriving = self._buffer_views(averager.means)

    def _find_places(self) -> list[_Place]:
        layout, averager = self._layout, self._averager
        offsets = parameter_offsets(layout.plan)
        buckets: list[list[BucketId]] = [[] for _ in layout.plan.parameters]
        for bucket in layout.plan.buckets:
            for piece in bucket.pieces:
                buckets[piece.parameter].append(bucket.id)
        return [
            _Place(
                one,
                gradient_view(averager.gradients, offsets[entry], one.parameter),
                gradient_view(averager.means, offsets[entry], one.parameter),
                tuple(buckets[entry]),
            )
            for entry, one in enumerate(layout.trained, layout.first)
        ]

    def _find_members(self) -> list[list[_Place]]:
        members: list[list[_Place]] = [[] for _ in self._layout.plan.buckets]
        for place in self._places:
            for bucket in place.buckets:
                members[bucket].append(place)
        return members

    def _hook(self, place: _Place) -> RemovableHandle:
        handle: RemovableHandle = place.trained.parameter.register_post_accumulate_grad_hook(
            lambda _: self._on_gradient(place)
        )
        return handle

    # -- the beginning and the end --

    def expect_sparse(self, parameters: Collection[int]) -> None:
        """Parameters, by id, whose gradients have whole rows or none; of others it is seen when they are made."""
        for place in self._places:
            place.sparse_dims = int(id(place.trained.parameter) in parameters)

    def start(self) -> None:
        """Block until the chief's parameters and buffers are in the model, unless all have those of a checkpoint."""
        self._put_values()
        self.step = self._averager.take_initial()
        if not self.step:
            self._take_values()

    def _put_values(self) -> None:
        with torch.no_grad():
            for place in self._places:
                place.leaving.copy_(place.trained.parameter)
            self._put_buffers()

    def _take_values(self) -> None:
        with torch.no_grad():
            for place in self._places:
                place.trained.parameter.copy_(place.mean)
            self._take_buffers()

    def publish(self) -> None:
        """Copy the chief's current parameters and buffers to all ranks."""
        if self._running:
            raise GradientMisuse("parameters cannot be published during a backward pass; do it after")
        kept = [(place, grad.clone()) for place in self._places if (grad := self._own_grad(place)) is not None]
        self._put_values()
        self._averager.publish(self.step)
        self.step += 1
        self._take_values()
        with torch.no_grad():
            for place, values in kept:
                place.mean.copy_(values)

    @staticmethod
    def _own_grad(place: _Place) -> Tensor | None:
        """Its gradient, if it lies in the averager's memory."""
        grad = place.trained.parameter.grad
        return grad if is_in(grad, place.mean) or is_in(grad, place.leaving) else None

    def close(self) -> None:
        """Take the hooks away; gradients keep their values."""
        for handle in self._handles:
            handle.remove()
        for place in self._places:
            if (grad := self._own_grad(place)) is not None:
                place.trained.parameter.grad = grad.clone()
        self._averager.close()

    # -- a backward pass --

    def _on_gradient(self, place: _Place) -> None:
        if not self._running and not self._skipping:
            self._begin()
        if self._skipping:
            return
        place.made += 1
        if not self._known:
            return
        if place.ready:
            raise GradientMisuse(
                f"backward made the gradient of {place.trained.name!r} {place.made} times in step {self.step}, but "
                f"{max(1, place.expected)} times in the first step, so it has been sent without the last; use "
                "torch.utils.checkpoint with use_reentrant=False, or call each layer as often in every step"
            )
        if place.made == max(1, place.expected):
            self._on_ready(place)

    def begin(self, step: Step) -> None:
        """Number the next step; where ``end_backward`` ends it, this begins it."""
        self.step = step
        if not self._ends_itself:
            self._start_step()

    def _begin(self) -> None:
        self._skipping = not self._synchronises()
        if self._ends_itself:
            self._call_at_end()
        if not self._skipping:
            self._start_step()

    def _start_step(self) -> None:
        self._running = True
        self._next = 0
        self._lacking = [len(members) for members in self._members]
        for entry in (self._layout.presence, 0 if self._layout.buffers else None):
            for bucket in () if entry is None else self._buckets_of(entry):
                self._lacking[bucket] += 1  # until backward has ended
        for place in self._places:
            place.made, place.ready = 0, False
        self._averager.begin(self.step)

    def _buckets_of(self, entry: int) -> list[BucketId]:
        return [b.id for b in self._layout.plan.buckets if any(piece.parameter == entry for piece in b.pieces)]

    def _call_at_end(self) -> None:
        at_end_of_backward(self._at_end)

    def _at_end(self) -> None:
        """A graph has been walked through. It may be one inside another: a layer that is computed again in backward."""
        outer = current_autograd_node()
        if outer is None:
            self.end_backward()
            return
        handles: list[RemovableHandle] = []

        def after_outer(*_: object) -> None:
            handles[0].remove()
            self._call_at_end()

        handles.append(outer.register_hook(after_outer))

    def _on_ready(self, place: _Place) -> None:
        place.ready = True
        self._take(place)
        for bucket in place.buckets:
            self._lacking[bucket] -= 1
        self._hand_over_full()

    def _hand_over_full(self) -> None:
        while self._next < len(self._lacking) and not self._lacking[self._next]:
            bucket, self._next = self._next, self._next + 1
            self._averager.hand_over(self.step, bucket)

    def _take(self, place: _Place) -> None:
        """Move this gradient to where it is handed over from."""
        parameter, scale = place.trained.parameter, self._averager.scale
        grad = parameter.grad
        assert grad is not None
        if (grad.dtype, grad.device) != (place.leaving.dtype, place.leaving.device):
            raise GradientMisuse(
                f"parameter {place.trained.name!r} was {place.leaving.dtype} on {place.leaving.device} when it was "
                f"wrapped and is now {grad.dtype} on {grad.device}; move or convert the model before job.wrap()"
            )
        place.sparse_dims = grad.sparse_dim() if grad.is_sparse else 0
        with torch.no_grad():
            if grad.is_sparse:
                spread(grad, place.leaving)
                if scale != 1.0:
                    place.leaving.mul_(scale)
                return
            if is_in(grad, place.leaving):
                if scale != 1.0:
                    place.leaving.mul_(scale)
                return
            if scale == 1.0:
                place.leaving.copy_(grad)
            else:
                torch.mul(grad, scale, out=place.leaving)
        # A tensor of its own, so that the program cannot move ours; what backward made is free from here on.
        parameter.grad = place.leaving.data

    def end_backward(self) -> None:
        """Backward has ended: close what is not filled, wait for the means, and put them into ``grad``."""
        if not self._running:
            self._skipping = False
            self.unshared = True
            return
        self.unshared = False
        late = [place for place in self._places if not place.ready]
        missing = self._close(late)
        self._averager.finish(self.step)
        self._give_means(missing)
        self._compare()
        self._running = False
        step, self.step = self.step, self.step + 1
        if not self._known:
            for place in self._places:
                place.expected = place.made
            self._known = True
        self._on_step(step)

    def _close(self, late: Sequence[_Place]) -> list[_Place]:
        """Fill what backward has not filled; returns parameters without any gradient on this rank."""
        missing = []
        for place in late:
            if place.trained.parameter.grad is None:
                missing.append(place)
                lacks_all(place.leaving) if place.sparse_dims else place.leaving.zero_()
            else:
                self._take(place)
        if self._layout.presence is not None:
            self._tell_presence(missing)
        self._tell_digests()
        with torch.no_grad():
            self._put_buffers()
        self._lacking = [0] * len(self._lacking)
        self._hand_over_full()
        return missing

    def _give_means(self, missing: Sequence[_Place]) -> None:
        without = {id(place) for place in missing}
        if missing and self._layout.presence is not None:
            # Only now, and only on this rank, must the numbers be read: a GPU's would be waited for.
            found = self._presence(self._averager.means).tolist()
            without = {id(p) for p, share in zip(self._places, found, strict=True) if not share} & without
        with torch.no_grad():
            for place in self._places:
                if id(place) in without:
                    continue
                parameter = place.trained.parameter
                if place.sparse_dims:
                    parameter.grad = gathered(place.mean, place.sparse_dims)
                elif not is_in(parameter.grad, place.mean):
                    parameter.grad = place.mean.data
            self._take_buffers()

    # -- what is no gradient --

    def _presence(self, arena: Tensor) -> Tensor:
        assert self._layout.presence is not None
        entry = self._layout.plan.parameters[self._layout.presence]
        kind = torch_dtype(entry.dtype)
        offset = self._layout.offset_of(self._layout.presence)
        return arena[offset : offset + entry.elements * kind.itemsize].view(kind)[: len(self._places)]

    def _tell_presence(self, missing: Sequence[_Place]) -> None:
        told = self._presence(self._averager.gradients)
        told.fill_(1.0)
        if missing:
            without = {id(place) for place in missing}
            numbers = [number for number, place in enumerate(self._places) if id(place) in without]
            told[torch.tensor(numbers, device=told.device)] = 0.0

    def _buffer_views(self, arena: Tensor) -> list[Tensor]:
        buffers = self._layout.buffers
        return buffer_views(arena, self._layout.offset_of(0), buffers) if buffers else []

    def _put_buffers(self) -> None:
        if self._buffers_leaving:
            foreach_copy_(self._buffers_leaving, list(self._layout.buffers))

    def _take_buffers(self) -> None:
        if self._buffers_arriving:
            foreach_copy_(list(self._layout.buffers), self._buffers_arriving)

    # -- what all ranks must have --

    def _tell_digests(self) -> None:
        """What the others compare with, if this rank is the chief: where its program is, and now and then digests."""
        sheet = self._layout.sheet
        if sheet is None:
            return
        self._stands = self._place()
        sheet[:1].fill_(self._stands)  # a kernel; ``sheet[0] = `` would be a copy, for which this thread waits
        if self._compares_now() or not sheet.is_cuda:
            self._turns = self._loops()[-LOOPS:]
            told = [number for one in self._turns for number in one]
            sheet[1:_DIGESTS] = torch.tensor([*told, *(_DIGESTS - 1 - len(told)) * [UNKNOWN_PLACE]])
        if self._compares_now():
            self._digests = [self.step, *digests_of(self.parameters)]
            sheet[_DIGESTS : _DIGESTS + len(self._digests)] = torch.tensor(self._digests)

    def _compares_now(self) -> bool:
        return self.step == 1 or self.step % COMPARE_EVERY == 0

    def _compare(self) -> None:
        """The sheet is the chief's now; where its step is this one, every number must be this rank's own."""
        sheet = self._layout.sheet
        # Reading it makes a GPU wait.
        if sheet is None or (sheet.is_cuda and not self._compares_now()):
            return
        chiefs = int(sheet[0])
        if UNKNOWN_PLACE not in (chiefs, self._stands) and chiefs != self._stands:
            self._on_elsewhere(self.step, self._stands, chiefs)
        if self._turns:
            turns = sheet[1:_DIGESTS].tolist()
            self._on_loops(self.step, self._turns, list(zip(turns[::2], turns[1::2], strict=True)))
        if self._digests[0] != self.step:
            return
        told = sheet[_DIGESTS : _DIGESTS + len(self._digests)].tolist()
        for name, mine, theirs in zip(self.names, self._digests[1:], told[1:], strict=True):
            if mine != theirs:
                raise self._averager.differs(self.step, name)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [place.trained.parameter for place in self._places]

    @property
    def names(self) -> list[str]:
        return [place.trained.name for place in self._places]
