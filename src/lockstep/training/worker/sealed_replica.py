"""One worker's model in your own program: gradients may be edited until ``optimizer.step()`` seals the step.

Each parameter's ``grad`` is a view into one flat memory, so clipping, unscaling and accumulating work in place. As soon
as backward has filled a bucket, it is copied to where it is sent from, which the program cannot reach: whatever is
edited during the transfer, the copy arrives unchanged. At the seal the two are compared byte by byte (there is no sum
or hash to be fooled, and it does not matter how an edit was made); if they differ, the bucket is copied and sent again.
After a step in which most buckets were edited, they are held until the seal: the result is the same, and nothing is
sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.protocol.core.ids import CHIEF, BucketId, Step
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.tensors import torch_dtype
from lockstep.training.worker.binding import Binding, BindingOptions, Bound, Trained, is_in


@dataclass(slots=True)
class _Filling:
    """A bucket in the current step."""

    members: tuple[Bound, ...]
    bits: Tensor
    """The program's gradients, as integers: a NaN is equal to itself, and 0 is not -0."""
    leaving: Tensor
    """What is sent, in the same form: a copy of ``bits`` as they were."""
    numbers: Tensor
    """The program's gradients in their own type."""
    lacking: int
    sent: bool = False
    extremes: Tensor | None = None
    """Its smallest and largest number, on a GPU, where reading them at once would stall the computation."""


@dataclass(frozen=True, slots=True)
class SealedStep:
    """The outcome of one step's gradients on this worker."""

    step: Step
    not_finite: str | None
    """The first parameter whose gradient contains NaN or infinity."""
    void: bool


class SealedReplica(Binding):
    """The model of one library worker."""

    def __init__(
        self,
        node: WorkerNode,
        trained: Sequence[Trained],
        optimizers: tuple[OptimizerEntry, ...],
        options: BindingOptions,
        *,
        hold: bool,
    ) -> None:
        """``hold``: buckets are never sent before the seal (two optimizers, or asynchronous training)."""
        super().__init__(node, trained, optimizers, options)
        self.holding = hold
        self.sent_again = 0
        """The number of buckets so far that were edited after they had been sent."""
        self.backward_since_step: set[int] = set()
        """Groups that got a gradient since the last seal."""
        self._fillings = [self._filling(bucket.id) for bucket in self.plan.buckets]
        self._not_finite: str | None = None
        self._filled: list[_Filling] = []
        self._handles = self._hook()

    def _filling(self, bucket: BucketId) -> _Filling:
        known = self.plan.buckets[bucket]
        where = slice(known.arena_offset, known.arena_offset + known.nbytes)
        gradients, leaving = self._gradients[where], self._memory.gradients[where]
        members = tuple({piece.parameter: self._bound[piece.parameter] for piece in known.pieces}.values())
        numbers = gradients.view(torch_dtype(known.dtype))
        return _Filling(members, gradients.view(torch.int64), leaving.view(torch.int64), numbers, len(members))

    def start(self) -> None:
        super().start()
        self._begin(self.step + 1)

    def _begin(self, step: Step) -> None:
        self.step = step
        self.backward_since_step.clear()
        self._not_finite = None
        for filling in self._fillings:
            filling.lacking, filling.sent = len(filling.members), False
            filling.extremes = None
        self._filled.clear()
        self._node.begin_step(step)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()

    # -- during backward --

    def _hook(self) -> list[RemovableHandle]:
        def hook_for(bound: Bound) -> RemovableHandle:
            handle: RemovableHandle = bound.trained.parameter.register_post_accumulate_grad_hook(
                lambda _: self._on_gradient(bound)
            )
            return handle

        # A frozen parameter cannot have a hook; if it is unfrozen later, its gradient is taken at the seal.
        return [hook_for(bound) for bound in self._bound if bound.trained.parameter.requires_grad]

    def _on_gradient(self, bound: Bound) -> None:
        self.backward_since_step.add(bound.trained.group)
        if bound.got_in == self.step:
            return  # another backward pass of this step: accumulated in place
        bound.got_in = self.step
        for bucket in bound.buckets:
            filling = self._fillings[bucket]
            filling.lacking -= 1
            if not filling.lacking:
                self._on_filled(bucket, filling)

    def _on_filled(self, bucket: BucketId, filling: _Filling) -> None:
        if not self._take(filling.members):
            return
        self._look_for_not_finite(filling)
        if not self.holding:
            filling.sent = True
            self._let_leave(bucket)

    def _let_leave(self, bucket: BucketId) -> None:
        filling = self._fillings[bucket]
        filling.leaving.copy_(filling.bits)
        self._memory.filled(self.step, bucket)

    def _take(self, members: Sequence[Bound]) -> bool:
        """Move gradients that autograd made elsewhere into our memory; False if one cannot be moved yet."""
        targets, sources = [], []
        for bound in members:
            gradient = bound.trained.parameter.grad
            if is_in(gradient, bound.gradient):
                continue
            if gradient is None or gradient.requires_grad or gradient.is_sparse:
                return False
            targets.append(bound)
            sources.append(gradient)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_([bound.gradient for bound in targets], sources)
            for bound in targets:
                _give(bound)
        return True

    def _look_for_not_finite(self, filling: _Filling) -> None:
        """Name the first parameter with NaN or infinity; on a GPU at the seal, when all buckets are checked."""
        if self._not_finite is not None or not filling.numbers.numel():
            return
        extremes = torch.stack(torch.aminmax(filling.numbers))
        if extremes.is_cuda:
            filling.extremes = extremes
            self._filled.append(filling)
        elif not bool(torch.isfinite(extremes).all()):
            self._name_not_finite(filling)

    def _look_at_all_on_gpu(self) -> None:
        """One wait for the GPU, whatever the number of buckets."""
        looked_at = [f for f in self._filled if f.extremes is not None]
        if self._not_finite is not None or not looked_at:
            return
        extremes = torch.stack([f.extremes.double() for f in looked_at if f.extremes is not None])
        for filling, fine in zip(looked_at, torch.isfinite(extremes).all(dim=1).tolist(), strict=True):
            if not fine:
                self._name_not_finite(filling)
                return

    def _name_not_finite(self, filling: _Filling) -> None:
        for bound in filling.members:
            if not bool(torch.isfinite(bound.gradient).all()):
                self._not_finite = bound.trained.name
                return

    # -- the seal --

    def seal(
        self,
        rates: tuple[GroupRates, ...],
        groups: Collection[int],
        *,
        void: bool,
        void_not_finite: bool,
        occasion: str,
    ) -> SealedStep:
        """The gradients of these groups are final. ``void``: no worker's gradients of this step are to be applied."""
        missing = {b.index for b in self._bound if b.trained.group not in groups or self._settle(b) is None}
        absent, late = self._sort_buckets(missing)
        edited = self._edited(absent)
        if void:
            self._not_finite = None
        else:
            for bucket in sorted({*late, *edited}):
                self._look_for_not_finite(self._fillings[bucket])
            self._look_at_all_on_gpu()
        void = void or (void_not_finite and self._not_finite is not None)
        for bucket in (*late, *edited):
            self._let_leave(bucket)
        self._learn_from(edited)
        # A parameter that is absent with its whole bucket need not be named.
        without = tuple(sorted(i for i in missing if any(b not in absent for b in self._bound[i].buckets)))
        self._send_seal(rates, tuple(sorted(absent)), without, void=void, occasion=occasion)
        return SealedStep(self.step, self._not_finite, void)

    def _send_seal(
        self,
        rates: tuple[GroupRates, ...],
        absent: tuple[BucketId, ...],
        without: tuple[int, ...] = (),
        *,
        void: bool = False,
        values: bool = False,
        occasion: str,
    ) -> None:
        speaks = self._node.task == CHIEF or self._node.config.aggregate is not None
        said = rates if speaks else ()
        node, step = self._node, self.step
        # The seal says which edition of each bucket is valid, so it must not overtake the last of them.
        self._memory.after_filled(
            lambda: node.seal(
                step, absent, said, without=without, void=void, values=values, occasion=occasion, state=None
            )
        )

    def _settle(self, bound: Bound) -> Tensor | None:
        """Make sure that our memory holds this parameter's gradient, whatever the program did with ``grad``."""
        gradient = bound.trained.parameter.grad
        if gradient is None or is_in(gradient, bound.gradient):
            return gradient
        with torch.no_grad():
            bound.gradient.copy_(gradient)
        _give(bound)
        return gradient

    def _sort_buckets(self, missing: set[int]) -> tuple[set[BucketId], list[BucketId]]:
        """Buckets without any gradient, and buckets with some that have not been sent yet."""
        absent: set[BucketId] = set()
        late = []
        for bucket, filling in enumerate(self._fillings):
            lacking = [bound for bound in filling.members if bound.index in missing]
            if len(lacking) == len(filling.members):
                absent.add(bucket)
                continue
            for bound in lacking:
                bound.gradient.zero_()
            if not filling.sent:
                late.append(bucket)
        return absent, late

    def _edited(self, absent: set[BucketId]) -> list[BucketId]:
        sent = [bucket for bucket, filling in enumerate(self._fillings) if filling.sent and bucket not in absent]
        differ = _differ([(self._fillings[b].bits, self._fillings[b].leaving) for b in sent])
        return [bucket for bucket, was_edited in zip(sent, differ, strict=True) if was_edited]

    def _learn_from(self, edited: list[BucketId]) -> None:
        self.sent_again += len(edited)
        sent = sum(filling.sent for filling in self._fillings)
        if sent and 2 * len(edited) > sent:
            self.holding = True

    # -- the next version --

    def wait_for_next(self) -> None:
        """Block until the next parameters are in the model, and begin their step."""
        reached = self._memory.wait(self.step + 1)
        self._use_new_values()
        # As an optimizer's own step does: backward through an earlier graph must fail, not use new values.
        torch.autograd.graph.increment_version([bound.trained.parameter for bound in self._bound])
        self._begin(reached)

    def publish_values(self, rates: tuple[GroupRates, ...], occasion: str, on_sealed: Callable[[], None]) -> None:
        """Copy the chief's current parameters to all workers; takes a separate step on every worker."""
        every = tuple(range(len(self.plan.buckets)))
        if self._node.task == CHIEF:
            self._let_values_leave()
            for bucket in every:
                self._memory.filled(self.step, bucket, in_full=True)
        self._send_seal(rates, () if self._node.task == CHIEF else every, values=True, occasion=occasion)
        on_sealed()
        self.wait_for_next()

    def bound_parameters(self) -> Sequence[Bound]:
        return self._bound


def _give(bound: Bound) -> None:
    """Give the program its gradient in our memory, but not our own tensor, which ``p.grad.data = ...`` would move."""
    bound.trained.parameter.grad = bound.gradient.data


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Which of these pairs are not equal."""
    if not any(one.is_cuda for one, _ in pairs):
        return [not torch.equal(one, other) for one, other in pairs]
    # Fetched together, so that there is one wait for the GPU, not one per bucket.
    found: list[bool] = torch.stack([(one != other).any() for one, other in pairs]).tolist()
    return found
