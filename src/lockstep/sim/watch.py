"""All watchdogs of a simulated cluster in one: a job without progress is examined and ended with a verdict.

It asks every task and monitor (``evidence_of``) and lets the real analysis decide. As in the runtime, the table of
``protocol/core/endings.py`` says when a cause ends the job. A task that cannot be notified leaves on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.verdict import Verdict
from lockstep.protocol.coordinator import coordinator_machine
from lockstep.protocol.core.causes import Cause, Reason, Source
from lockstep.protocol.core.effects import JobEnded
from lockstep.protocol.core.endings import seconds_allowed
from lockstep.protocol.core.events import Broken, BucketApplied, Event, Prepared, Produced, Sealed, StepBegun
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.timing import FIRST_STEPS_FACTOR, PATIENCE_SECONDS, PROMISE_SECONDS
from lockstep.sim.evidence import evidence_of
from lockstep.sim.world import World

LOOK_EVERY = 2.0
FIRST_STEPS = 3
FIRST_STEPS_PATIENCE = FIRST_STEPS_FACTOR * PATIENCE_SECONDS
LAST_WORD_SECONDS = 10.0
"""How long after the verdict, or after the coordinator left, tasks that were not notified leave on their own."""
_PROGRESS = frozenset({Produced, BucketApplied, StepBegun, Sealed, Prepared})


@dataclass(frozen=True, slots=True)
class WatchdogFinding:
    """What was found about a job that was stuck."""

    at: float
    still: float
    """Seconds without progress until then."""
    verdict: Verdict


class SimulatedWatchdog:
    """Watches one run."""

    def __init__(self, world: World) -> None:
        self.finding: WatchdogFinding | None = None
        """The verdict that ended the job, if one did."""
        self.noticed: list[WatchdogFinding] = []
        """What was reported before, in order: causes that may heal."""
        self.left_behind: set[TaskId] = set()
        """Tasks that could not be notified of the end."""
        self._world = world
        self._progress_at = 0.0
        self._ended = False
        world.watching = self._saw

    def begin(self) -> None:
        self._world.agenda.after(LOOK_EVERY, self._look)

    def _saw(self, _name: TaskId, event: Event, now: float) -> None:
        if type(event) in _PROGRESS:
            self._progress_at = now

    def _look(self) -> None:
        world = self._world
        if world.over:
            return
        home = world.tasks[world.scenario.shape.coordinator]
        if home.started and home.left and not self._ended:
            self._ended = True
            world.agenda.after(LAST_WORD_SECONDS, partial(self._leave_all, None))
        machine = home.machine.coordinator
        assert machine is not None
        still = world.agenda.now - self._progress_at
        running = machine.phase is coordinator_machine.JobPhase.RUNNING
        if not self._ended and running and still >= PROMISE_SECONDS:
            self._judge(still)
        world.agenda.after(LOOK_EVERY, self._look)

    def _judge(self, still: float) -> None:
        world = self._world
        verdict = analyse(evidence_of(world, self._patience())).verdict
        cause = Cause.UNKNOWN if verdict is None else verdict.cause
        scenario = world.scenario
        stalled = still >= seconds_allowed(cause, scenario.stall_after, scenario.user_code_timeout)
        if verdict is None:
            if not stalled:
                return
            verdict = Verdict(cause=Cause.UNKNOWN, culprit=str(world.scenario.shape.coordinator), what="no task waits")
        finding = WatchdogFinding(world.agenda.now, still, verdict)
        ends = stalled or (verdict.proven and not verdict.heals)
        if not ends:
            self.noticed.append(finding)
            return
        self.finding = finding
        self._ended = True
        self._end(verdict, Reason(verdict.cause, verdict.what, Source.VERDICT if verdict.proven else Source.STALL))

    def _patience(self) -> float:
        """As in the runtime: the first steps compile, tune and load, and prove little."""
        newest = max(task.machine.role.step for task in self._world.tasks.values())
        return FIRST_STEPS_PATIENCE if newest < FIRST_STEPS else PATIENCE_SECONDS

    def _end(self, verdict: Verdict, reason: Reason) -> None:
        world = self._world
        outcome = JobEnded(False, verdict.culprit, verdict.step, reason)
        home = world.tasks[world.scenario.shape.coordinator]
        if home.lives:
            world.handle(home.machine.task, Broken(TaskId.parse(verdict.culprit), verdict.step, reason))
        world.agenda.after(LAST_WORD_SECONDS, partial(self._leave_all, outcome))

    def _leave_all(self, outcome: JobEnded | None) -> None:
        """Any task that is still here was not notified. A frozen one is ended by its monitor."""
        home = self._world.scenario.shape.coordinator
        for name, task in self._world.tasks.items():
            if not task.lives or (name == home and task.outcome is not None):
                continue
            self.left_behind.add(name)
            if task.outcome is None and outcome is not None and not task.frozen:
                task.outcome = outcome
            self._world.leave(task, orderly=not task.frozen)
