"""What must hold after every event, whatever the network does: cheap checks run at once, the rest when a step ends.

The bytes are checked where they are read and written (``memory.py``, ``oracle.py``); here are the rules that can be
checked on the machines alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, JobId, Step, TaskId, worker
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.sim.oracle import Oracle
from lockstep.sim.task import SimTask
from lockstep.sim.violation import Rule, Violation

_LOOK_AT_WAITS_EVERY = 8
_LOOK_INTO_LARGE_EVERY = 1009


class Invariants:
    """Watches the machines of one run."""

    def __init__(
        self, shape: ClusterShape, oracles: Mapping[JobId, Oracle], tasks: Mapping[TaskId, SimTask], *, large: bool
    ) -> None:
        """``large``: checks of a whole machine run when its step ends, and only occasionally in between."""
        self._oracles = oracles
        self._tasks = tasks
        self._whole_every = _LOOK_INTO_LARGE_EVERY if large else 1
        self._home = shape.coordinator
        self._committed: Step = INITIAL_STEP - 1
        self._highest: Step = INITIAL_STEP - 1
        """The newest step that any incarnation of the coordinator has committed."""
        self._watched: CoordinatorMachine | None = None
        self._events = 0

    @property
    def _coordinator(self) -> CoordinatorMachine:
        machine = self._tasks[self._home].machine.coordinator
        assert machine is not None
        return machine

    @property
    def _oracle(self) -> Oracle:
        return self._oracles[self._coordinator.job]

    def after_event(self, name: TaskId) -> None:
        """Only ``name`` has changed."""
        task = self._tasks[name]
        machine = task.machine
        self._events += 1
        if machine.role.step != task.step_checked or self._events % self._whole_every == 0:
            task.step_checked = machine.role.step
            machine.check()
        if machine.coordinator is not None:
            self._check_commit(machine.coordinator.committed)
            if machine.coordinator.aggregate is not None:
                self._check_decision()
        if machine.server is not None:
            self._check_server(task, machine.server)
        if self._events % (_LOOK_AT_WAITS_EVERY * self._whole_every) == 0:
            self._check_waits(machine)

    def _check_commit(self, committed: Step) -> None:
        """Commits only go up, and only after every bucket of every server is there."""
        if self._coordinator is not self._watched:
            # A new incarnation of the coordinator does not know the former one's commits.
            self._watched, self._committed = self._coordinator, INITIAL_STEP - 1
        if committed < self._committed:
            raise Violation(Rule.COMMIT_TAKEN_BACK, f"step {self._committed} was committed, and now only {committed}")
        if committed > self._committed and not self._oracle.complete(committed + 1):
            raise Violation(
                Rule.EARLY_COMMIT, f"step {committed} is committed before every bucket is at version {committed + 1}"
            )
        self._committed = committed

    def _check_decision(self) -> None:
        """With backup workers, the workers that make a step are decided once."""
        decision = self._coordinator.decision
        self._oracle.contributors_said(decision.step, tuple(worker(index) for index in decision.workers))

    def _check_server(self, task: SimTask, role: ServerMachine) -> None:
        if role.committed < task.committed_seen:
            raise Violation(Rule.COMMIT_TAKEN_BACK, f"{role.task} forgot that a step was committed")
        self._highest = max(self._highest, self._coordinator.committed)
        if role.committed > self._highest:
            raise Violation(
                Rule.EARLY_COMMIT, f"{role.task} counts step {role.committed} as committed before the coordinator does"
            )
        task.committed_seen = role.committed

    def before_apply(self, name: TaskId, effect: Apply) -> None:
        """The slot it writes to holds the previous version, which may go only once its server knows of the commit."""
        self._check_decision()
        role = self._tasks[name].machine.server
        if self._oracle.mode.synchronous and role is not None and role.committed < effect.step - 1:
            raise Violation(
                Rule.EARLY_COMMIT,
                f"{name} applies step {effect.step} but knows of no commit after step {role.committed}: "
                "an early commit",
            )

    def _check_waits(self, machine: TaskMachine) -> None:
        """Every wait has a waiter, a peer, and a name."""
        for wait in machine.waits():
            if wait.waiter != machine.task or wait.on not in self._tasks or wait.kind is WaitKind.OTHER:
                raise Violation(Rule.VAGUE_WAIT, f"a wait that no one can act on: {wait}")

    def after_tick(self, name: TaskId, now: float) -> None:
        """A deadline that stays in the past would make the loop spin."""
        deadline = self._tasks[name].machine.next_deadline()
        if deadline is not None and deadline <= now:
            raise Violation(
                Rule.DEADLINE_IN_THE_PAST, f"{name} was ticked at {now} and still has a deadline at {deadline}"
            )
