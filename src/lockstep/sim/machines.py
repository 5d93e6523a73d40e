"""Makes the real machines of a simulated task. A test that plants a defect overrides one method."""

from __future__ import annotations

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.recovery import Beginning
from lockstep.protocol.core.ids import Incarnation, JobId, Role, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Join, Setting
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.async_server_machine import AsyncServerMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.task import TaskMachine, TaskRole
from lockstep.protocol.worker.worker_machine import WorkerMachine
from lockstep.sim.scenario import Scenario

JOURNAL_ROWS = 5000
JOURNAL_ROWS_OF_LARGE = 500
LARGE = 64
"""Thousands of full journals would be gigabytes."""


class MachineMaker:
    """The machines as the runtime makes them."""

    def task_machine(
        self,
        scenario: Scenario,
        task: TaskId,
        incarnation: Incarnation,
        job: JobId,
        now: float,
        beginning: Beginning | None = None,
    ) -> TaskMachine:
        """All machines of a task that starts now. ``beginning``: where a job that it coordinates begins."""
        shape = scenario.shape
        journal = Journal(JOURNAL_ROWS if shape.servers + shape.workers < LARGE else JOURNAL_ROWS_OF_LARGE)
        settings = (dict(scenario.odd_settings).get(task, Setting("optimizer", "sgd")),)
        join = Join(str(task), incarnation, f"host-{task.role.value}-{task.index}", 1000 + task.index, settings)
        deadline = now + scenario.startup_timeout
        returns = scenario.rules.returns
        member = MemberMachine(task, shape.coordinator, join, deadline, journal, now, returns=returns)
        roles: list[TaskRole] = []
        if task.role is Role.WORKER:
            roles.append(self.worker(scenario, task, journal))
        if task in shape.homes:
            roles.append(self.server(scenario, task, journal))
        coordinator = None
        if task == shape.coordinator:
            coordinator = self.coordinator(scenario, job, journal, now, beginning or Beginning())
        return TaskMachine(incarnation, member, tuple(roles), coordinator, journal)

    def worker(self, scenario: Scenario, task: TaskId, journal: Journal) -> WorkerMachine:
        lags, tells_state = scenario.aggregate is not None, scenario.rules.keeps_states
        eager = not scenario.mode.seals
        return WorkerMachine(task, scenario.shape, journal, eager=eager, may_lag=lags, tells_state=tells_state)

    def server(self, scenario: Scenario, task: TaskId, journal: Journal) -> ServerMachine:
        eager = not scenario.mode.seals
        if not scenario.mode.synchronous:
            return AsyncServerMachine(task, scenario.shape, journal, eager=eager)
        aggregate, any_rates = scenario.aggregate, scenario.shrinks
        averages = not scenario.servers
        return ServerMachine(
            task,
            scenario.shape,
            journal,
            eager=eager,
            aggregate=aggregate,
            any_rates=any_rates,
            averages=averages,
            overwrites=scenario.overwrites,
        )

    def coordinator(
        self, scenario: Scenario, job: JobId, journal: Journal, now: float, beginning: Beginning
    ) -> CoordinatorMachine:
        shape, aggregate, rules = scenario.shape, scenario.aggregate, scenario.rules
        return CoordinatorMachine(shape, job, journal, now, aggregate=aggregate, rules=rules, beginning=beginning)
