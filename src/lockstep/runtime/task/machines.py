"""Makes the machines of one task: that of its membership, those of its sides, and what decides for the job."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence

from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.rank_coordinator import RankCoordinator
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.ids import Incarnation, Role, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Join
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.task import TaskMachine, TaskRole
from lockstep.runtime.task.node_config import NodeConfig


def make_machines(
    config: NodeConfig, incarnation: Incarnation, roles: Sequence[TaskRole], journal: Journal, now: float
) -> TaskMachine:
    """All machines of this task behind one door; ``roles``: those of its sides."""
    spec, shape = config.cluster, config.cluster.shape
    rules = config.recovery.of(shape)
    join = Join(str(config.task), incarnation, socket.gethostname(), os.getpid(), config.settings)
    first = server(1) if rules.server_replicas else worker(1) if rules.ranks_return else None
    deadline = now + spec.startup_timeout
    member = MemberMachine(
        config.task, shape.coordinator, join, deadline, journal, now, returns=rules.returns, deputy=first
    )
    deputy = _make_deputy(config, rules, journal)
    coordinator = _make_coordinator(config, rules, journal, now)
    return TaskMachine(incarnation, member, tuple(roles), coordinator, journal, deputy)


def _make_deputy(config: NodeConfig, rules: RecoveryRules, journal: Journal) -> DeputyMachine | None:
    """What holds the coordinator's decisions, where another task may have to take its place."""
    shape = config.cluster.shape
    if rules.server_replicas and config.task.role is Role.SERVER:
        return DeputyMachine(config.task, shape, rules, journal)
    if rules.ranks_return:
        return DeputyMachine(config.task, shape, rules, journal, RankCoordinator)
    return None


def _make_coordinator(
    config: NodeConfig, rules: RecoveryRules, journal: Journal, now: float
) -> CoordinatorMachine | None:
    """What decides for the job, on the task where that begins."""
    shape, beginning = config.cluster.shape, config.beginning
    job = secrets.randbits(63) + 1
    if config.task != shape.coordinator:
        return None
    if rules.server_replicas:
        return HomedCoordinator(shape, job, journal, now, rules=rules, beginning=beginning)
    if rules.ranks_return:
        return RankCoordinator(shape, job, journal, now, rules=rules, beginning=beginning)
    return CoordinatorMachine(shape, job, journal, now, aggregate=config.aggregate, rules=rules, beginning=beginning)
