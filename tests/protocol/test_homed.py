"""Servers with second homes, as they run: the loss of any one, at any event, is not noticed in the result."""

from __future__ import annotations

import random

import pytest

from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import Role, TaskId, server

from .homed_world import HomedWorld


def _undisturbed(**shape: int) -> HomedWorld:
    world = HomedWorld(**shape)
    world.run()
    return world


def _ended_well(world: HomedWorld) -> bool:
    outcomes = [task.ended for task in world.tasks.values() if task.alive]
    return all(ended is not None and ended.ok for ended in outcomes)


def test_a_run_that_nobody_disturbs_makes_every_step_once() -> None:
    world = _undisturbed()
    assert _ended_well(world)
    assert len(world.numbers()) == 4
    assert all(len(by) == 1 for by in world.made.values())


@pytest.mark.parametrize(("lost", "leaves"), [(1, False), (0, False), (0, True)], ids=["server", "coordinator", "said"])
def test_a_server_is_killed(lost: int, leaves: bool) -> None:
    """At every sixth event; ``leaves``: what follows from the event is still said."""
    calm = _undisturbed()
    numbers, moments = calm.numbers(), calm.history[calm.formed_at :]
    for event in [event for task, event in moments if task == server(lost)][lost::6]:
        world = HomedWorld()
        world.kills[server(lost), event] = leaves
        world.run()
        assert _ended_well(world), f"killed at event {event}\n{world.story()}"
        assert world.numbers() == numbers, f"killed at event {event}\n{world.story()}"


class _Again(HomedWorld):
    """Every server that is killed comes back, and once all are whole again, another one may be killed."""

    def handle(self, name: TaskId, event: object) -> None:
        task = self.tasks[name]
        may = name.role is Role.SERVER and task.alive and task.ended is None and len(self.killed) < 3
        if self.killed and may and self.dice.random() < 0.02 and self.is_whole:
            self.kills[name, task.events] = self.dice.random() < 0.5
        super().handle(name, event)  # type: ignore[arg-type]

    dice = random.Random(0)


@pytest.mark.parametrize("servers", [2, 3])
def test_servers_that_come_back_are_filled_and_may_be_lost_again(servers: int) -> None:
    dice, several = random.Random(servers), 0
    for seed in range(3):
        shape = {"seed": seed, "servers": servers, "steps": 8, "buckets": 3}
        calm = _undisturbed(**shape)
        world = _Again(**shape)
        world.restarts, world.dice, world.keeps_last_words = True, random.Random(seed), bool(seed % 2)
        moments = [moment for moment in calm.history[calm.formed_at :] if moment[0].role is Role.SERVER]
        world.kills[dice.choice(moments[: len(moments) // 2])] = bool(seed % 3)
        world.run(20_000)
        assert world.numbers() == calm.numbers(), world.story()
        several += len(world.killed) > 1
    assert several


def test_a_job_that_has_lost_both_homes_ends_and_says_so() -> None:
    calm = _undisturbed()
    world = HomedWorld()
    middle = [event for task, event in calm.history if task == server(1)][30]
    world.kills[server(1), middle] = True
    world.kills[server(0), [event for task, event in calm.history if task == server(0)][-8]] = True
    world.run()
    assert world.killed == [server(1), server(0)]
    outcomes = [task.ended for name, task in world.tasks.items() if task.alive]
    assert all(ended is not None and not ended.ok and ended.reason.cause is Cause.DEAD for ended in outcomes)


def test_nothing_follows_from_a_decision_that_the_deputy_does_not_hold() -> None:
    world = HomedWorld()
    world.run()
    coordinator = world.tasks[server(0)].machine.coordinator
    assert isinstance(coordinator, HomedCoordinator)
    deputy = world.tasks[server(1)].machine.deputy
    assert deputy is not None
    assert deputy.held is not None
    assert deputy.held.step == coordinator.committed
    assert deputy.held.ends == (coordinator.end,)
