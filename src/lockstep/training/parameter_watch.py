"""Whether parameters are still finite: a job whose weights are NaN would run on to a good end, with nothing to show.

One number per parameter is looked at, in one pass over all of them. How often follows from what a look costs: less than
one percent of the time, so a small model is looked at in every step, a large one every few seconds. A value that is
not finite does not become finite again. On a GPU a look is queued, and read when it is done: nothing waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.ids import Step
from lockstep.training.torch_private import foreach_norm

REST = 200.0
"""So many times as long as the last look took, there is no other: it costs half a percent at most."""
FIRST_LOOKS = 10
"""In any case: most programs that fail this way fail at once."""


class ParametersNotFinite(Exception):  # noqa: N818 - what happened, as in the other errors of this package
    """A parameter contains NaN or infinity; the text names it and says what to do."""


@dataclass(frozen=True, slots=True)
class NotFiniteParameter:
    """What was found."""

    name: str
    step: Step
    """Its value is the one after this step; -1: before the first."""
    finite: Step | None
    """The last step after which all were finite; None: nobody has looked before."""

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step >= 0 else "before the first step"
        gap = self.finite is not None and self.finite < self.step - 1
        before = f" (all were finite after step {self.finite})" if gap else ""
        return f"parameter {self.name!r} contains NaN or infinity {when}{before}"


class ParameterWatch:
    """The parameters of one process."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._named = [(name, parameter) for name, parameter in named if parameter.is_floating_point()]
        self._clock = clock
        self._next = 0.0
        self.looks = 0
        self._finite: Step | None = None
        self._queued: tuple[Step, Tensor, torch.cuda.Event] | None = None
        self._found = False

    def look(self, step: Step) -> NotFiniteParameter | None:
        """The parameters are those after ``step``. What was found now, or by an earlier look; once."""
        began = self._clock()
        if self._found or not self._named:
            return None
        if self._queued is not None:
            return self._read_queued() if self._queued[2].query() else None
        if self.looks >= FIRST_LOOKS and began < self._next:
            return None
        self.looks += 1
        norms = self._norms()
        if norms.is_cuda:
            self._queue(step, norms)
            found = None
        else:
            found = self._judge(step, norms)
        ended = self._clock()
        self._next = ended + REST * (ended - began)
        return found

    def look_now(self, step: Step) -> NotFiniteParameter | None:
        """As ``look``, whatever it costs: nothing comes after this step."""
        if self._found or not self._named:
            return None
        return (self._read_queued() if self._queued is not None else None) or self._judge(step, self._norms())

    def _norms(self) -> Tensor:
        values = [parameter.detach() for _, parameter in self._named]
        return torch.stack([norm.float() for norm in foreach_norm(values)])

    def _queue(self, step: Step, norms: Tensor) -> None:
        here = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        here.copy_(norms, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._queued = (step, here, done)

    def _read_queued(self) -> NotFiniteParameter | None:
        assert self._queued is not None
        (step, norms, done), self._queued = self._queued, None
        done.synchronize()
        return self._judge(step, norms)

    def _judge(self, step: Step, norms: Tensor) -> NotFiniteParameter | None:
        suspects = [one for one, norm in zip(self._named, norms.tolist(), strict=True) if not math.isfinite(norm)]
        # A norm may be too large for its type where no value is.
        bad = next((name for name, parameter in suspects if not bool(parameter.detach().isfinite().all())), None)
        if bad is None:
            self._finite = step
            return None
        self._found = True
        return NotFiniteParameter(bad, step, self._finite)
