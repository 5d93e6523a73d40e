"""What must hold after every event, whatever the network does.

What becomes of the bytes is checked where they are read and written (``memory``, ``oracle``); here are the rules that
can be read off the machines.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.protocol.coordinator import CoordinatorMachine
from lockstep.protocol.effects import Apply
from lockstep.protocol.ids import INITIAL_STEP, Step, TaskId, worker
from lockstep.protocol.server import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.sim.memory import Violation
from lockstep.sim.oracle import Oracle

_LOOK_AT_WAITS_EVERY = 8


class Invariants:
    """Watches the machines of one run."""

    def __init__(self, oracle: Oracle, machines: Mapping[TaskId, TaskMachine]) -> None:
        self._oracle = oracle
        self._machines = machines
        self._synchronous = oracle.mode.synchronous
        self._coordinator = self._find_coordinator()
        self._committed: Step = INITIAL_STEP - 1
        self._known: dict[TaskId, Step] = {}
        self._events = 0

    def _find_coordinator(self) -> CoordinatorMachine:
        return next(m.coordinator for m in self._machines.values() if m.coordinator is not None)

    def after_event(self, name: TaskId) -> None:
        """Only ``name`` has changed."""
        machine = self._machines[name]
        machine.check()
        if machine.coordinator is not None:
            self._check_commit(machine.coordinator.committed)
            self._check_decision()
        if isinstance(machine.role, ServerMachine):
            self._check_server(name, machine.role)
        self._events += 1
        if self._events % _LOOK_AT_WAITS_EVERY == 0:
            self._check_waits(machine)

    def _check_commit(self, committed: Step) -> None:
        """Commits go up, and only after every bucket of every server is there."""
        if committed < self._committed:
            raise Violation(f"step {self._committed} was committed, and now only {committed}")
        if committed > self._committed and not self._oracle.complete(committed + 1):
            raise Violation(f"step {committed} is committed before every bucket is at version {committed + 1}")
        self._committed = committed

    def _check_decision(self) -> None:
        """With backup workers, who makes a step is decided once."""
        decision = self._coordinator.decision
        self._oracle.contributors_said(decision.step, tuple(worker(index) for index in decision.workers))

    def _check_server(self, name: TaskId, role: ServerMachine) -> None:
        if role.committed < self._known.get(name, INITIAL_STEP - 1):
            raise Violation(f"{name} forgot that a step was committed")
        if role.committed > self._coordinator.committed:
            raise Violation(f"{name} takes step {role.committed} for committed before the coordinator does")
        self._known[name] = role.committed

    def before_apply(self, name: TaskId, effect: Apply) -> None:
        """The slot it writes to holds the version before: that may go only once its server knows of the commit."""
        self._check_decision()
        role = self._machines[name].role
        if self._synchronous and isinstance(role, ServerMachine) and role.committed < effect.step - 1:
            raise Violation(
                f"{name} applies step {effect.step} and knows of no commit after step {role.committed}: an early commit"
            )

    def _check_waits(self, machine: TaskMachine) -> None:
        """Every wait has a waiter, a peer, and a name."""
        for wait in machine.waits():
            if wait.waiter != machine.task or wait.on not in self._machines or not wait.what:
                raise Violation(f"a wait that nobody can act on: {wait}")

    def after_tick(self, name: TaskId, now: float) -> None:
        """A deadline that stays in the past would make the loop spin."""
        deadline = self._machines[name].next_deadline()
        if deadline is not None and deadline <= now:
            raise Violation(f"{name} was ticked at {now} and still has a deadline at {deadline}")
