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

    def remember(self, step: Step) -> None:
        self._marks = self._digests() if step < FIRST_STEPS or step % EVERY == 0 else None

    def forget(self) -> None:
        self._marks = None

    def compare(self, step: Step) -> None:
        """Raise UsageError naming the first parameter that changed."""
        if self._marks is None:
            return
        for bound, before, now in zip(self._bound, self._marks, self._digests(), strict=True):
            if before != now:
                name = bound.trained.name
                raise UsageError(
                    f"your program changed parameter {name!r} in step {step}, not the optimizer; the servers hold the "
                    "parameters and would undo the change. Call job.publish() after such a change, on every worker"
                )

    def _digests(self) -> list[list[int]]:
        return digest_lists([bound.local for bound in self._bound])
