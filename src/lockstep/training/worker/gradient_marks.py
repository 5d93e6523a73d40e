"""Whether a gradient is still what it was, by torch's own count of changes: without looking at its numbers.

The count does not see everything (``grad.data``, a gradient scaler's ``unscale_``). So bits are compared in the first
steps and now and then, and where the count did not see a change, it is not trusted any more: programs do nearly the
same in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.weak import TensorWeakRef

from lockstep.protocol.core.ids import Step
from lockstep.training.torch_private import changes_of
from lockstep.training.worker.binding import Bound

FIRST_STEPS = 3
EVERY = 50


class GradientMarks:
    """Of each parameter: which tensor its gradient was, and how often that had been changed."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self._bound = bound
        self._marks: dict[int, tuple[TensorWeakRef, int]] = {}
        self.trusted = True

    def looks_at(self, step: Step) -> bool:
        """Whether bits are compared in this step in any case."""
        return step < FIRST_STEPS or step % EVERY == 0

    def forget(self) -> None:
        self._marks.clear()

    def drop(self, bound: Bound) -> None:
        """Another backward pass has added to this gradient."""
        self._marks.pop(bound.index, None)

    def set(self, bound: Bound) -> None:
        gradient = bound.trained.parameter.grad
        assert gradient is not None
        self._marks[bound.index] = (TensorWeakRef(gradient), changes_of(gradient))

    def holds(self, bound: Bound) -> bool:
        """Whether this gradient is the same; also if there was none and there still is none."""
        gradient, known = bound.trained.parameter.grad, self._marks.get(bound.index)
        if gradient is None or known is None:
            return gradient is None and known is None
        return known[0]() is gradient and known[1] == changes_of(gradient)

    @property
    def all_hold(self) -> bool:
        """Whether no gradient that was marked has changed."""
        return all(self.holds(one) for one in self._bound if one.index in self._marks)
