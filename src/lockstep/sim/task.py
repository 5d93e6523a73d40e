"""One simulated task: its machines, what is around them, and the events it has not handled yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.protocol.core.effects import JobEnded
from lockstep.protocol.core.events import Event
from lockstep.protocol.core.ids import INITIAL_STEP, Incarnation, Step, TaskId
from lockstep.protocol.task import TaskMachine

if TYPE_CHECKING:
    from lockstep.sim.server_side import SimulatedServer
    from lockstep.sim.worker_side import SimulatedWorker


@dataclass(slots=True)
class SimTask:
    """One incarnation of a member of the cluster."""

    machine: TaskMachine
    worker: SimulatedWorker | None
    server: SimulatedServer | None
    start_at: float
    lives_before: int = 0
    """How many incarnations of this member have ended."""
    started: bool = False
    left: bool = False
    outcome: JobEnded | None = None
    tick_at: float | None = None
    step_seen: Step = INITIAL_STEP
    """The newest step that this task is known to have begun."""
    step_checked: Step = INITIAL_STEP - 1
    """The step at which all of its machines were last checked."""
    committed_seen: Step = INITIAL_STEP - 1
    """The newest step that this server was seen to know as committed."""
    events: deque[Event] = field(default_factory=deque)
    """Events that its loop has not handled, oldest first."""
    draining: bool = False
    loop_free_at: float = 0.0
    loop_busy: float = 0.0
    """Seconds that the loop has worked."""
    frozen_since: float = -1.0
    answers: bool = False
    """Frozen, but its threads other than the loop still answer."""
    blocked_callbacks: dict[TaskId, tuple[float, float]] = field(default_factory=dict)
    """Links on which a callback does not return: since when, until when."""
    held_up: list[Callable[[], None]] = field(default_factory=list)
    """Work that came due while it was frozen."""
    died_at: float = -1.0
    exit_code: int = 0
    members: dict[TaskId, Incarnation] = field(default_factory=dict)
    """The members of its job, as it knows them."""
    met: dict[TaskId, Incarnation] = field(default_factory=dict)
    """The incarnation of each peer that it was last linked to."""

    @property
    def sides(self) -> tuple[SimulatedWorker | SimulatedServer, ...]:
        """What is around its machines: of its role, or of both if it is a rank."""
        return tuple(side for side in (self.worker, self.server) if side is not None)

    @property
    def lives(self) -> bool:
        return self.started and not self.left

    @property
    def frozen(self) -> bool:
        return self.frozen_since >= 0

    @property
    def behind(self) -> bool:
        """Whether something has happened that the machines do not know yet."""
        return bool(self.events) or self.draining or self.frozen

    def act(self, action: Callable[[], None]) -> None:
        """Do some work of this task; later if it is frozen now."""
        if self.frozen:
            self.held_up.append(action)
        else:
            action()
