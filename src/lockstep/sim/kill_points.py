"""Kills tasks, or sends them SIGTERM, at chosen events: every moment of a run can be tried.

Events are numbered per task, across all of its incarnations. A run without interruptions lists the events at which
tasks can be killed (``moments``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from lockstep.protocol.core.events import SignalCame
from lockstep.protocol.core.ids import INITIAL_STEP, Step, TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.sim import disturb
from lockstep.sim.task import SimTask
from lockstep.sim.world import World


@dataclass(frozen=True, slots=True)
class KillPoint:
    """``task`` is killed when it handles its ``event``-th event: before or after the effects are carried out."""

    task: TaskId
    event: int
    effects_done: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a run: the task that handled it, its number there, and the newest committed step at that time."""

    task: TaskId
    event: int
    committed: Step


class KillPoints:
    """The interruptions of one run. No task is killed once the end of the job is decided."""

    def __init__(
        self, world: World, kills: Iterable[KillPoint] = (), signals: Iterable[tuple[TaskId, int]] = ()
    ) -> None:
        """``signals``: the tasks that receive SIGTERM, each with the number of the event after which it comes."""
        self.moments: list[Moment] = []
        """The events of the run before the end of the job was decided."""
        self.now = Moment(world.scenario.shape.coordinator, -1, INITIAL_STEP - 1)
        """The event that is being handled."""
        self.killed = 0
        self._world = world
        self._kills = frozenset(kills)
        self._signals = frozenset(signals)
        self._events: dict[TaskId, int] = dict.fromkeys(world.scenario.shape.tasks(), 0)
        world.interrupter = self

    def event_begins(self, task: SimTask) -> None:
        name = task.machine.task
        coordinator = self._world.tasks[self._world.scenario.shape.coordinator].machine.coordinator
        assert coordinator is not None
        self.now = Moment(name, self._events[name], coordinator.committed)
        self._events[name] += 1

    def kills_before_effects(self, task: SimTask) -> bool:
        return self._kill_if_due(task, effects_done=False)

    def event_ended(self, task: SimTask) -> None:
        if not self._kill_if_due(task, effects_done=True) and (self.now.task, self.now.event) in self._signals:
            signal = partial(self._world.handle, self.now.task, SignalCame(Departure.SIGTERM))
            self._world.agenda.after(0.0, signal)

    def _kill_if_due(self, task: SimTask, *, effects_done: bool) -> bool:
        if self._job_has_ended():
            return False
        if not effects_done:
            self.moments.append(self.now)
        if KillPoint(self.now.task, self.now.event, effects_done) not in self._kills or task.outcome is not None:
            return False
        self.killed += 1
        disturb.crash(self._world, task, restart_after=self._world.rng.seconds(self._world.scenario.restart))
        return True

    def _job_has_ended(self) -> bool:
        coordinator = self._world.tasks[self._world.scenario.shape.coordinator].machine.coordinator
        return coordinator is not None and coordinator.end is not None and coordinator.end.ok
