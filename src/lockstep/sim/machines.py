"""Makes the real machines of a simulated task. A test that plants a defect overrides one method of it."""

from __future__ import annotations

from lockstep.protocol.async_server import AsyncServerMachine
from lockstep.protocol.coordinator import CoordinatorMachine
from lockstep.protocol.ids import ClusterShape, Incarnation, JobId, Role, TaskId
from lockstep.protocol.journal import Journal
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.messages import Join, Setting
from lockstep.protocol.recovery import Beginning, LossPolicy, RecoveryRules
from lockstep.protocol.server import ServerMachine
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker import WorkerMachine
from lockstep.sim.scenario import Scenario

JOURNAL_ROWS = 5000
JOURNAL_ROWS_OF_LARGE = 500
LARGE = 64
"""Thousands of full journals would be gigabytes."""


class MachineMaker:
    """The machines as the runtime makes them."""

    def task_machine(
        self, scenario: Scenario, task: TaskId, incarnation: Incarnation, job: JobId, now: float
    ) -> TaskMachine:
        """All machines of a task that starts now."""
        shape = scenario.shape
        journal = Journal(JOURNAL_ROWS if shape.servers + shape.workers < LARGE else JOURNAL_ROWS_OF_LARGE)
        settings = (dict(scenario.odd_settings).get(task, Setting("optimizer", "sgd")),)
        join = Join(str(task), incarnation, "", f"host-{task.role.value}-{task.index}", 1000 + task.index, settings)
        deadline = now + scenario.startup_timeout
        member = MemberMachine(task, shape.coordinator, join, deadline, journal, now)
        make_role = self.worker if task.role is Role.WORKER else self.server
        role: WorkerMachine | ServerMachine = make_role(scenario, task, journal)
        coordinator = self.coordinator(scenario, job, journal, now) if task == shape.coordinator else None
        return TaskMachine(incarnation, member, role, coordinator, journal)

    def worker(self, scenario: Scenario, task: TaskId, journal: Journal) -> WorkerMachine:
        lags = scenario.aggregate is not None
        return WorkerMachine(task, scenario.servers, journal, eager=not scenario.mode.seals, may_lag=lags)

    def server(self, scenario: Scenario, task: TaskId, journal: Journal) -> ServerMachine:
        eager = not scenario.mode.seals
        if not scenario.mode.synchronous:
            return AsyncServerMachine(task, scenario.shape, journal, eager=eager)
        return ServerMachine(task, scenario.shape, journal, eager=eager, aggregate=scenario.aggregate)

    def coordinator(self, scenario: Scenario, job: JobId, journal: Journal, now: float) -> CoordinatorMachine:
        return CoordinatorMachine(scenario.shape, job, "", journal, now, aggregate=scenario.aggregate)


def life_machine(
    shape: ClusterShape,
    task: TaskId,
    incarnation: Incarnation,
    rules: RecoveryRules,
    beginning: Beginning,
    job: JobId,
    now: float,
    *,
    eager: bool = True,
) -> TaskMachine:
    """All machines of one life of a task in synchronous training, where lives come and go (``lives.py``)."""
    journal = Journal(JOURNAL_ROWS)
    join = Join(str(task), incarnation, "", "host", 1, ())
    member = MemberMachine(task, shape.coordinator, join, now + 300.0, journal, now, returns=rules.returns)
    role: WorkerMachine | ServerMachine
    if task.role is Role.WORKER:
        role = WorkerMachine(task, shape.servers, journal, eager=eager, tells_state=rules.keeps_states)
    else:
        shrinks = rules.on_worker_loss is LossPolicy.SHRINK
        role = ServerMachine(task, shape, journal, eager=eager, any_rates=shrinks)
    coordinator = None
    if task == shape.coordinator:
        coordinator = CoordinatorMachine(shape, job, "", journal, now, rules=rules, beginning=beginning)
    return TaskMachine(incarnation, member, role, coordinator, journal)
