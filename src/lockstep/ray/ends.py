"""How the tasks of a job on Ray ended, and the error that tells the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_VERDICT, LockstepError

LOST: Final = -1
"""In place of an exit code: its actor is gone for good."""


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """One task's end, as its actor reports it."""

    exit_code: int
    result: bytes = b""
    """What ``train`` returned, as Ray writes values; empty for a server, which never returns from it."""
    error: str = ""
    """What ``train`` raised."""

    def words(self) -> str:
        if self.exit_code == LOST:
            return f"is lost for good ({self.error})"
        return f"ended with exit code {self.exit_code}" + (f" ({self.error})" if self.error else "")


class RayRunError(LockstepError):
    """The job failed. ``exit_codes`` has the tasks that ended so far, -1 for one that is lost for good."""

    def __init__(self, ends: Mapping[str, TaskEnd]) -> None:
        self.exit_codes = {name: end.exit_code for name, end in ends.items()}
        name = first_cause(ends)
        super().__init__(f"{name} {ends[name].words()}; what it printed is in the output above and in Ray's logs")


def first_cause(ends: Mapping[str, TaskEnd]) -> str:
    """Whose end says most: an own error comes before the verdicts and losses of others, which may follow from it."""
    order = (EXIT_BAD_INPUT, EXIT_FAILED, LOST, EXIT_VERDICT)
    failed = [name for name, end in ends.items() if end.exit_code]
    return min(failed, key=lambda name: order.index(code) if (code := ends[name].exit_code) in order else len(order))
