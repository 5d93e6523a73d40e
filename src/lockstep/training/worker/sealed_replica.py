"""One worker's model in your own program: a gradient is final when ``optimizer.step()`` seals the step.

The program's gradients are its own: where autograd made them, to be clipped, unscaled, accumulated or replaced. As soon
as backward has filled a bucket, it is copied to where it is sent from, which the program cannot reach: whatever is
edited during the transfer, the copy arrives unchanged. At the seal the two are compared bit by bit (there is no sum or
hash to be fooled, and it does not matter how an edit was made); if they differ, the bucket is copied and sent again.
After a step in which most buckets were edited, nothing is copied before the seal: the result is the same, nothing is
sent twice, and nothing is compared, so that such a program pays for one pass over its gradients. They then follow the
seal, so that servers begin with the first bucket while the others are copied. Where servers read gradients on the
worker's GPU it is so from the start: sending takes no time there, and to compare, this thread would wait for the GPU.

A program that lets the servers clip (``ask_norm``) need not edit anything. Where torch's own count of changes has told
the truth in the first steps, it is believed, and bits are compared only now and then: nothing then passes over the
gradients after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from lockstep.protocol.core.ids import CHIEF, BucketId, Step
from lockstep.protocol.core.messages import Clip, GroupRates, LoopCount, OptimizerEntry
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.torch_private import foreach_norm
from lockstep.training.worker.arrivals import Arrivals
from lockstep.training.worker.binding import Binding, BindingOptions, Bound, Trained
from lockstep.training.worker.fillings import Filling, FillingPart, Fillings, edited
from lockstep.training.worker.gradient_marks import GradientMarks


@dataclass(frozen=True, slots=True)
class SealedStep:
    """The outcome of one step's gradients on this worker."""

    step: Step
    not_finite: str | None
    """The first parameter whose gradient contains NaN or infinity."""
    void: bool


class SealedReplica:
    """The model of one library worker."""

    def __init__(
        self,
        node: WorkerNode,
        trained: Sequence[Trained],
        optimizers: tuple[OptimizerEntry, ...],
        options: BindingOptions,
        *,
        hold: bool,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        """``hold``: buckets are never sent before the seal (two optimizers, or asynchronous training). ``layers``: the
        models whose layers may wait for their parameters one by one, in the next forward."""
        self._binding = Binding(node, trained, optimizers, options)
        self.plan = self._binding.plan
        self.step: Step = -1
        self.holding = hold
        self.sent_again = 0
        """The number of buckets so far that were edited after they had been sent."""
        self.backward_since_step: set[int] = set()
        """Groups that got a gradient since the last seal."""
        self.accumulating = 0
        """More is added to the gradients before they are sent."""
        self._asked = False
        self._questions = 0
        self._marks = GradientMarks(self._binding.bound)
        self._latest = GradientMarks(self._binding.bound)
        """As backward left them, and not as they left."""
        self.on_second_backward: Callable[[], None] = lambda: None
        """Called when a backward pass adds to gradients that no step has taken."""
        self._again: Bound | None = None
        """The parameter that tells this, once for each pass."""
        self._node = node
        self._finite = _NotFinite()
        self._unread: tuple[Step, _NotFinite] | None = None
        """The latest step whose gradients the GPU may not have made yet."""
        self._fillings = Fillings(self._binding, self._on_gradient)
        self._arrivals = Arrivals(self._binding, layers)

    def bound_parameters(self) -> Sequence[Bound]:
        return self._binding.bound

    def start(self) -> None:
        """Block until the parameters of the first step are in the model, and begin it."""
        self._begin(self._binding.start())

    def _begin(self, step: Step) -> None:
        self.step = step
        self.backward_since_step.clear()
        self._asked = False
        self._marks.forget()
        self._latest.forget()
        self._again = None
        self._finite = _NotFinite()
        self.holding = self.holding or self._binding.memory.stays_on_gpu
        self._fillings.begin(step)
        self._arrivals.begin(step, ())

    def settle(self) -> None:
        """Block until the model has all parameters of this step."""
        self._arrivals.settle()

    def close(self) -> None:
        """Release the model; its parameters keep their last values."""
        self._arrivals.close()
        self._fillings.close()
        self._binding.close()

    def _on_gradient(self, bound: Bound) -> None:
        """During backward."""
        self._arrivals.settle()
        self.backward_since_step.add(bound.trained.group)
        gradient = bound.trained.parameter.grad
        # Another backward pass of this step has added to the first one's; the seal finds that.
        if gradient is not None:
            self._latest.set(bound)
        again = self._fillings.has(bound)
        if again:
            self._marks.drop(bound)
            self._again = self._again or bound
            if self._again is bound:
                self.on_second_backward()
        if gradient is None or gradient.is_sparse or again or self.accumulating:
            return
        self._marks.set(bound)
        for filling in self._fillings.add(bound, gradient):
            # Also if nothing is sent yet: clipping would spread a NaN to all gradients.
            self._finite.look_at(self._finite.noted([filling]))
            if self.holding:
                filling.waiting.clear()
            else:
                self._fillings.fill(filling)

    @property
    def changed_after_backward(self) -> bool:
        """Whether the program has written to gradients of this step after backward made them, as far as torch counts
        that; it counts clipping."""
        return not self._latest.all_hold

    # -- the seal --

    def seal(
        self,
        rates: tuple[GroupRates, ...],
        groups: Collection[int],
        *,
        void: bool,
        void_not_finite: bool,
        occasion: str,
        clip: tuple[Clip, ...] = (),
        loops: tuple[LoopCount, ...] = (),
    ) -> list[SealedStep]:
        """The gradients of these groups are final. ``void``: no worker's gradients of this step are to be applied.

        Returns the steps of which it is known by now whether their gradients were finite. On a GPU where this decides
        nothing (``void_not_finite``), this step is not among them: to read its norms, this thread would have to wait
        until the GPU has made them, and the GPU would then wait for this thread.
        """
        self._arrivals.settle()
        missing, absent = self._missing(groups)
        without = self._without(missing, absent)

        def send(*, void: bool) -> None:
            self._send_seal(rates, tuple(sorted(absent)), without, void=void, occasion=occasion, clip=clip, loops=loops)

        if void:
            self._finite.forget()
        asked = self._asked and any(one.by_norm for one in clip)
        unsent = [] if asked else self._unsent(absent, missing, believes=False)
        early = not void and not void_not_finite and self._may_follow_seal(unsent)
        if early:
            send(void=False)
        self._hand_over(unsent, missing)
        later = not void and not void_not_finite and self._finite.must_wait
        if later:
            self._finite.fetch()
        not_finite = None if void or later else self._finite.first()
        void = void or (void_not_finite and not_finite is not None)
        if not early:
            send(void=void)
        known = self.read_late()
        if later:
            self._unread = (self.step, self._finite)
            return known
        return [*known, SealedStep(self.step, not_finite, void)]

    def _missing(self, groups: Collection[int]) -> tuple[set[int], set[BucketId]]:
        """The parameters without a gradient, and the buckets that have none at all."""
        missing = {
            bound.index
            for bound in self._binding.bound
            if bound.trained.group not in groups or bound.trained.parameter.grad is None
        }
        return missing, {one.id for one in self._fillings.buckets if len(one.without(missing)) == len(one.parts)}

    def _without(self, missing: set[int], absent: set[BucketId]) -> tuple[int, ...]:
        """A parameter that is absent with its whole bucket need not be named."""
        return tuple(sorted(i for i in missing if any(b not in absent for b in self._binding.bound[i].buckets)))

    def _may_follow_seal(self, unsent: Sequence[Filling]) -> bool:
        """Whether servers may hear of the seal before these buckets leave: they then begin with the first of them while
        the others are on their way. None of these has left before, so the seal counts no edition but the first."""
        config = self._node.config
        made_by_all = config.synchronous and config.aggregate is None
        first = not any(map(self._fillings.is_sent, unsent))
        return bool(unsent) and first and made_by_all and not self._binding.memory.stays_on_gpu

    def _hand_over(self, unsent: Sequence[Filling], missing: set[int]) -> None:
        """Let these buckets leave, as their gradients are now. Those of the first layers go first: the next forward
        needs them first."""
        for filling in unsent:
            self._fillings.take(filling, missing)
        leaving = self._finite.noted(unsent)
        if self._binding.memory.stays_on_gpu:  # nobody begins with the first of them before the last is there
            self._fillings.fill_together(unsent)
        else:
            for filling in reversed(unsent):
                self._fillings.fill(filling)
        self._finite.look_at(leaving)  # after they have left: servers wait for them, and nobody for this

    def read_late(self) -> list[SealedStep]:
        """The sealed step that was not known yet, if there is one; waits until the GPU has made its gradients."""
        unread, self._unread = self._unread, None
        return [] if unread is None else [SealedStep(unread[0], unread[1].first(), void=False)]

    # -- clipping the mean --

    def ask_norm(self, groups: Collection[int], clip: Clip, occasion: str) -> Callable[[], float]:
        """Hand over the gradients of these groups, and ask what the norm of their mean is. Does not wait: the function
        that it returns does.

        Unless ``seal`` follows, the step is not made: another backward pass begins it anew.
        """
        self._arrivals.settle()
        missing, absent = self._missing(groups)
        self._hand_over(self._unsent(absent, missing, believes=True), missing)
        without = self._without(missing, absent)
        self._send_seal((), tuple(sorted(absent)), without, occasion=occasion, clip=(clip,), asks=True)
        self.remember(groups)
        self._asked = True
        self._questions += 1
        node, step, question = self._node, self.step, self._questions
        return lambda: node.wait_norm(step, question)

    def remember(self, groups: Collection[int]) -> None:
        """From now on these gradients must stay as they are (``first_edited``)."""
        self._marks.forget()
        for bound in self._binding.bound:
            if bound.trained.group in groups and bound.trained.parameter.grad is not None:
                self._marks.set(bound)

    def first_edited(self, groups: Collection[int]) -> str | None:
        """The first parameter whose gradient was changed since ``remember`` or ``ask_norm``."""
        bound = [one for one in self._binding.bound if one.trained.group in groups]
        found = next((one.trained.name for one in bound if not self._marks.holds(one)), None)
        if found is None and self._asked and self._marks.looks_at(self.step):
            missing, _ = self._missing(groups)
            sent = [one for one in self._fillings.buckets if not one.without(missing)]
            found = next((one.parts[0].bound.trained.name for one in edited(sent)), None)
        return found

    def _changed(self, sent: Sequence[Filling], *, believes: bool) -> list[Filling]:
        """Those of these buckets that are no longer as they left. ``believes``: torch's count of changes, if it has
        told the truth so far."""
        marked = [one for one in sent if not all(self._marks.holds(part.bound) for part in one.parts)]
        if believes and self._marks.trusted and not self._marks.looks_at(self.step):
            return marked
        differ = edited(sent)
        self._marks.trusted &= all(one in marked for one in differ)
        return differ

    def _unsent(self, absent: set[BucketId], missing: set[int], *, believes: bool) -> list[Filling]:
        """Buckets that have not left, or not as they are now."""
        present = [filling for filling in self._fillings.buckets if filling.id not in absent]
        sent = [filling for filling in present if self._fillings.is_sent(filling)]
        taken_away = [filling for filling in sent if filling.without(missing)]
        differ = taken_away + self._changed([one for one in sent if not one.without(missing)], believes=believes)
        self.sent_again += len(differ)
        if 2 * len(differ) > len(sent):
            self.holding = True
        return [filling for filling in present if filling in differ or not self._fillings.is_sent(filling)]

    def _send_seal(
        self,
        rates: tuple[GroupRates, ...],
        absent: tuple[BucketId, ...],
        without: tuple[int, ...] = (),
        *,
        void: bool = False,
        values: bool = False,
        occasion: str,
        clip: tuple[Clip, ...] = (),
        asks: bool = False,
        loops: tuple[LoopCount, ...] = (),
    ) -> None:
        speaks = self._node.task == CHIEF or self._node.config.aggregate is not None
        said = rates if speaks else ()
        node, step = self._node, self.step
        # The seal says which edition of each bucket is valid, so it must not overtake one that has left before.
        self._binding.memory.after_filled(
            lambda: node.seal(
                step,
                absent,
                said,
                without=without,
                void=void,
                values=values,
                occasion=occasion,
                state=None,
                clip=clip,
                asks=asks,
                loops=loops,
            )
        )

    # -- the next version --

    def wait_for_next(self, *, at_once: bool = True) -> None:
        """Begin the next step. Block until its parameters are in the model, or leave that to whatever uses them.

        ``at_once``: block in any case.
        """
        # As an optimizer's own step does: backward through an earlier graph must fail, not use new values.
        torch.autograd.graph.increment_version([bound.trained.parameter for bound in self._binding.bound])
        self._begin(self._arrivals.expect(self.step + 1, at_once=at_once))

    def publish_values(self, rates: tuple[GroupRates, ...], occasion: str, on_sealed: Callable[[], None]) -> None:
        """Copy the chief's current parameters to all workers; takes a separate step on every worker."""
        self._arrivals.settle()
        every = tuple(range(len(self.plan.buckets)))
        if self._node.task == CHIEF:
            self._binding.let_values_leave()
            for bucket in every:
                self._binding.memory.filled(self.step, bucket, in_full=True)
        self._send_seal(rates, () if self._node.task == CHIEF else every, values=True, occasion=occasion)
        on_sealed()
        self.wait_for_next()


@dataclass(frozen=True, slots=True)
class _Noted:
    """A bucket, and the gradients that are copied to it."""

    filling: Filling
    waiting: tuple[tuple[FillingPart, Tensor], ...]


class _NotFinite:
    """Which gradients of a step contain NaN or infinity. So does one whose norm is too large for its type."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._now: dict[BucketId, bool] = {}
        """Whether a bucket has any, as it was last looked at."""
        self._unread: list[tuple[Filling, list[str], Tensor]] = []
        """Norms, with their parameters' names. Reading them at once would stall a GPU."""
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None
        """Whether each of them is finite, in host memory once the event has passed."""

    def forget(self) -> None:
        """Nothing of this step counts."""
        self._first = None
        self._now.clear()
        self._unread.clear()

    @property
    def must_wait(self) -> bool:
        """Whether ``first`` would wait for a GPU."""
        return bool(self._unread)

    def noted(self, fillings: Sequence[Filling]) -> list[_Noted]:
        """The gradients that wait for these buckets, to be looked at once they have left; perhaps not for the first
        time."""
        return [_Noted(filling, tuple(filling.waiting)) for filling in fillings if filling.waiting]

    def look_at(self, noted: Sequence[_Noted]) -> None:
        """With few calls for all buckets of one type."""
        for _, alike in groupby(noted, key=lambda one: one.filling.numbers.dtype):
            self._look_at(list(alike))

    def _look_at(self, noted: Sequence[_Noted]) -> None:
        gradients = [part.of(gradient) for one in noted for part, gradient in one.waiting]
        small = gradients[0].element_size() == 2
        norms = torch.stack(foreach_norm(gradients, dtype=torch.float32 if small else None))
        for one, own in zip(noted, norms.split([len(one.waiting) for one in noted]), strict=True):
            self._unread.append((one.filling, [part.bound.trained.name for part, _ in one.waiting], own))
        if not norms.is_cuda:
            self._read(self._are_finite().tolist())

    def fetch(self) -> None:
        """Queue what ``first`` will read: it then waits for what the GPU has been given until now, and nothing later.

        Without this, ``first`` would queue it, behind a whole further step.
        """
        finite = self._are_finite()
        there = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
        there.copy_(finite, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(finite.device))
        self._coming = there, event

    def first(self) -> str | None:
        """The first parameter that was found, if any gradient is still not finite."""
        if self._coming is not None:
            there, event = self._coming
            event.synchronize()
            self._read(there.tolist())
            self._coming = None
        elif self._unread:
            self._read(self._are_finite().tolist())
        return self._first if any(self._now.values()) else None

    def _are_finite(self) -> Tensor:
        """One tensor, so that there is one wait for the GPU, whatever the number of buckets."""
        return torch.isfinite(torch.cat([norms for _, _, norms in self._unread]))

    def _read(self, answers: Sequence[bool]) -> None:
        finite = iter(answers)
        for filling, names, _ in self._unread:
            bad = [name for name in names if not next(finite)]
            self._now[filling.id] = bool(bad)
            if bad and self._first is None:
                self._first = bad[0]
        self._unread.clear()
