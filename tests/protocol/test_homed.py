"""Servers with second homes, as they run: the loss of any one, at any event, is not noticed in the result."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Apply, CallAnswered, Effect, JobEnded, Send, SendVersion, Serve
from lockstep.protocol.core.events import Calling, LinkUp, Received
from lockstep.protocol.core.ids import Role, TaskId, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import CallComplete, CallMade, CallOpen, CallPlace, Member, Pull, Question, View
from lockstep.protocol.core.placement import Homes
from lockstep.protocol.server import second_shard
from lockstep.protocol.server.homed_machine import HomedServerMachine
from lockstep.protocol.worker.caller_machine import CallerMachine
from lockstep.sim.replicas.judged_world import JudgedWorld
from lockstep.sim.replicas.stores import Stores
from lockstep.sim.replicas.world import TICKET, ReplicaWorld


def _undisturbed(**shape: int) -> ReplicaWorld:
    world = ReplicaWorld(**shape)
    world.run()
    return world


def _ended_well(world: ReplicaWorld) -> bool:
    outcomes = [task.ended for task in world.tasks.values() if task.alive]
    return all(ended is not None and ended.ok for ended in outcomes)


def test_a_run_that_nobody_disturbs_makes_every_step_once() -> None:
    world = _undisturbed()
    assert _ended_well(world)
    assert len(world.numbers()) == 4
    servers = [
        task.machine.server for task in world.tasks.values() if isinstance(task.machine.server, HomedServerMachine)
    ]
    assert {times for machine in servers for times in machine.steps_made.values()} == {world.steps + 1}


def test_a_deputy_holds_no_decision_of_a_later_view_without_its_members() -> None:
    deputy = _undisturbed().tasks[server(1)].machine.deputy
    assert deputy is not None
    held = deputy.held
    assert held is not None
    assert held.joins
    for view, answers in ((held.view + 1, 0), (held.view, 1)):
        told = replace(held, number=held.number + 1, view=view, joins=())
        assert len(deputy.handle(Received(server(0), 1, told), 0.0)) == answers
    assert deputy.held == replace(held, number=held.number + 1)


@pytest.mark.parametrize(("lost", "leaves"), [(1, False), (0, False), (0, True)], ids=["server", "coordinator", "said"])
def test_a_server_is_killed(lost: int, leaves: bool) -> None:
    """At every sixth event; ``leaves``: what follows from the event is still said."""
    calm = _undisturbed()
    numbers, moments = calm.numbers(), calm.history[calm.formed_at :]
    for event in [event for task, event in moments if task == server(lost)][lost::6]:
        world = ReplicaWorld()
        world.kills[server(lost), event] = leaves
        world.run()
        assert _ended_well(world), f"killed at event {event}\n{world.story()}"
        assert world.numbers() == numbers, f"killed at event {event}\n{world.story()}"


class _Again(JudgedWorld):
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
        world.servers_return, world.dice, world.keeps_last_words = True, random.Random(seed), bool(seed % 2)
        moments = [moment for moment in calm.history[calm.formed_at :] if moment[0].role is Role.SERVER]
        world.kills[dice.choice(moments[: len(moments) // 2])] = bool(seed % 3)
        world.run(20_000)
        assert world.numbers() == calm.numbers(), world.story()
        several += len(world.killed) > 1
    assert several


def test_a_job_that_has_lost_both_homes_ends_and_says_so() -> None:
    calm = _undisturbed()
    world = ReplicaWorld()
    middle = [event for task, event in calm.history if task == server(1)][30]
    world.kills[server(1), middle] = True
    world.kills[server(0), [event for task, event in calm.history if task == server(0)][-8]] = True
    world.run()
    assert world.killed == [server(1), server(0)]
    outcomes = [task.ended for name, task in world.tasks.items() if task.alive]
    assert all(ended is not None and not ended.ok and ended.reason.cause is Cause.DEAD for ended in outcomes)


def test_homes_that_made_something_else_of_the_same_gradients_end_the_job_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Server 0 is the second home of server 1's shard, and makes another version 2 of one bucket."""
    made = Stores._update

    def drifts(self: Stores, name: TaskId, effect: Apply, mean: list[int]) -> None:
        is_it = effect.in_background and name == server(0) and (effect.step, effect.bucket) == (1, moved)
        made(self, name, effect, [mean[0] ^ 1] if is_it else mean)

    monkeypatch.setattr(second_shard, "DIGEST_EVERY", 2)
    monkeypatch.setattr(Stores, "_update", drifts)
    world = ReplicaWorld(steps=4)
    moved = next(bucket.id for bucket in world.plan.buckets if bucket.server == 1)
    world.run()
    said = "server 1 and server 0 made step 1 of the same gradients, and their bits differ"
    reason = Reason(Cause.HOMES_DIFFER, f"{said}; which of the two is wrong is not known", peer=str(server(1)))
    ended = JobEnded(False, str(server(0)), 1, reason)
    assert {name: task.ended for name, task in world.tasks.items()} == dict.fromkeys(world.tasks, ended)


def test_nothing_follows_from_a_decision_that_the_deputy_does_not_hold() -> None:
    world = ReplicaWorld()
    world.run()
    coordinator = world.tasks[server(0)].machine.coordinator
    assert isinstance(coordinator, HomedCoordinator)
    deputy = world.tasks[server(1)].machine.deputy
    assert deputy is not None
    assert deputy.held is not None
    assert deputy.held.step == coordinator.committed
    assert deputy.held.ends == (coordinator.end,)


def _view(number: int, lead: int, lives: tuple[int, int] = (11, 12)) -> View:
    """Server ``lead`` is the home of everything."""
    homes = Homes(lead, 1 - lead)
    members = tuple(Member(str(server(index)), life) for index, life in enumerate(lives))
    return View(77, number, members, 0, shards=(homes, homes), decisions=(homes,))


def test_a_worker_in_a_call_says_its_value_to_whoever_coordinates_now() -> None:
    """The former coordinator had it; the one that took over has no open call."""
    caller = CallerMachine(worker(0), server(0), Journal())
    for index in range(2):
        caller.handle(LinkUp(server(index), 11 + index), 0.0)
    made = CallMade(CallPlace(1, 2, 0), "gather", "", "", "here:1", b"value")
    assert caller.handle(Calling(made), 0.0) == [Send(server(0), made)]
    caller.handle(Received(server(0), 11, CallOpen(made.place, (1,))), 0.1)
    assert caller.handle(Received(server(1), 12, _view(2, 1)), 0.2) == [Send(server(1), made)]
    assert caller.handle(Received(server(0), 11, _view(1, 0)), 0.3) == [], "a late word of the former one"
    answer = CallComplete(made.place, (0, 1), (b"value", b"other"))
    assert caller.handle(Received(server(0), 11, answer), 0.4) == []
    assert caller.handle(Received(server(1), 12, answer), 0.5) == [CallAnswered(answer)]


def test_a_server_that_is_not_the_home_does_not_answer_when_it_becomes_it() -> None:
    """Another one has answered since: to load a state again would undo steps."""
    world = ReplicaWorld()
    world.run()
    name = server(1)
    machine = world.tasks[name].machine.server
    assert isinstance(machine, HomedServerMachine)
    chief = worker(0)
    life = world.tasks[chief].machine.incarnation
    bucket = next(one.id for one in world.plan.buckets if one.server == 0)
    asked = Question(1, "to load", b"", bucket, changes=True, view=machine.places.view)
    assert machine.handle(Received(chief, life, asked), 1.0) == []
    later = _view(machine.places.view + 1, 1, (1, world.tasks[name].machine.incarnation))
    assert [one for one in machine.handle(Received(name, 0, later), 1.1) if isinstance(one, Serve)] == []
    meant = Question(2, "to load", b"", bucket, changes=True, view=later.number)
    assert machine.handle(Received(chief, life, meant), 1.2) == [Serve(chief, meant, tells=True)]


def test_what_is_asked_in_a_later_view_waits_for_that_view() -> None:
    world = ReplicaWorld()
    world.run()
    name, chief = server(1), worker(0)
    machine = world.tasks[name].machine.server
    assert isinstance(machine, HomedServerMachine)
    bucket = next(one.id for one in world.plan.buckets if one.server == 0)
    later = _view(machine.places.view + 1, 1, (1, world.tasks[name].machine.incarnation))
    early = Question(1, "the state", b"", bucket, view=later.number)
    assert machine.handle(Received(chief, world.tasks[chief].machine.incarnation, early), 1.0) == []
    assert Serve(chief, early) in machine.handle(Received(name, 0, later), 1.1)


def test_a_version_goes_only_to_a_worker_that_knows_who_is_its_home_now() -> None:
    """It would refuse it, and get it again ten seconds later."""
    world = ReplicaWorld()
    world.run()
    name, chief = server(1), worker(0)
    machine = world.tasks[name].machine.server
    assert isinstance(machine, HomedServerMachine)
    life = world.tasks[chief].machine.incarnation
    moved = {one.id for one in world.plan.buckets if one.server == 0}
    pull = Pull(next(iter(machine._ledgers.values())).version, (), TICKET, view=machine.places.view)
    machine.handle(Received(chief, life, pull), 1.0)
    later = _view(machine.places.view + 1, 1, (1, world.tasks[name].machine.incarnation))

    def sent(effects: list[Effect]) -> set[int]:
        return {one.bucket for one in effects if isinstance(one, SendVersion) and one.peer == chief} & moved

    assert sent(machine.handle(Received(name, 0, later), 1.1)) == set()
    assert sent(machine.handle(Received(chief, life, replace(pull, view=later.number)), 1.2)) == moved
