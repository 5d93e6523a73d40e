"""Detects parameters that the program changed itself: only the optimizer may, since servers do not see the change."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.library.errors import UsageError
from lockstep.protocol.core.ids import Step
from lockstep.training.digests import digest_lists
from lockstep.training.worker.binding import Bound

FIRST_STEPS = 3
EVERY = 50
"""Programs do nearly the same in every step, so checking the first steps and an occasional later one is enough."""


class EditGuard:
    """Remembers the parameters' bits when they arrive, and compares them before the next step."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self._bound = [b for b in bound if b.local.numel()]
        self._marks: list[list[int]] | None = None

    def looks_at(self, step: Step) -> bool:
        """Whether the parameters of this step are compared: then all of them are read when it begins."""
        return step < FIRST_STEPS or step % EVERY == 0

    def remember(self, step: Step, *, always: bool = False) -> None:
        self._marks = self._digests() if always or self.looks_at(step) else None

    def forget(self) -> None:
        self._marks = None

    def compare(self, step: Step) -> None:
        """Raise UsageError naming the first parameter that changed."""
        name = self.first_changed()
        if name is not None:
            raise UsageError(
                f"your program changed parameter {name!r} in step {step}, not the optimizer; the servers hold the "
                "parameters and would undo the change. Call job.publish() after such a change, on every worker"
            )

    def first_changed(self) -> str | None:
        """The first parameter that is not as it arrived, if this step's are compared."""
        if self._marks is None:
            return None
        both = zip(self._bound, self._marks, self._digests(), strict=True)
        return next((bound.trained.name for bound, before, now in both if before != now), None)

    def _digests(self) -> list[list[int]]:
        return digest_lists([bound.local for bound in self._bound])
