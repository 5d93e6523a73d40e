"""A task leaves before the end of its job because it received a signal: what that means for the others.

SIGINT and SIGHUP come from a person: the job ends on every task. SIGTERM ends one task, and is a loss like any other
once it is clear that it is not meant for the whole job: a batch system that ends a job signals every task, one after
the other. So a task that receives it stays for ``SIGNAL_WINDOW_SECONDS`` and continues its work. If the coordinator's
task receives it as well, or alone, the job is shut down: its step is finished and saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.core.timing import SIGNAL_WINDOW_SECONDS


class Departure(IntEnum):
    """Why a task leaves: the signal that it received, by its number."""

    SIGHUP = 1
    SIGINT = 2
    SIGTERM = 15

    @classmethod
    def of(cls, number: int) -> Departure | None:
        """None for 0, and for a number that no task of this version sends."""
        return cls(number) if number in set(cls) else None

    @property
    def ends_the_job(self) -> bool:
        """Sent by a person: all tasks end."""
        return self is not Departure.SIGTERM

    @property
    def exit_code(self) -> int:
        return 128 + self.value


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The coordinator's task received SIGTERM: the job ends once ``version``, or a later one, is saved."""

    version: int
    deadline: float


@dataclass(slots=True)
class Leavers:
    """The coordinator's record of tasks that received SIGTERM."""

    _since: dict[TaskId, tuple[Incarnation, float]] = field(default_factory=dict)
    _gone: set[tuple[TaskId, Incarnation]] = field(default_factory=set)

    def note(self, task: TaskId, incarnation: Incarnation, now: float) -> bool:
        """Whether this was not yet known."""
        known = self._since.get(task)
        if known is not None and known[0] == incarnation:
            return False
        self._since[task] = (incarnation, now)
        return True

    def overdue(self, now: float) -> list[tuple[TaskId, Incarnation]]:
        """The tasks whose window is over; they count as gone from now on."""
        due = [(task, life) for task, (life, since) in self._since.items() if now >= since + SIGNAL_WINDOW_SECONDS]
        for task, life in due:
            self.dismiss(task, life)
        return due

    def dismiss(self, task: TaskId, incarnation: Incarnation) -> None:
        self._since.pop(task, None)
        self._gone.add((task, incarnation))

    def is_gone(self, task: TaskId, incarnation: Incarnation) -> bool:
        return (task, incarnation) in self._gone

    def deadline(self) -> float | None:
        return min((since + SIGNAL_WINDOW_SECONDS for _, since in self._since.values()), default=None)
