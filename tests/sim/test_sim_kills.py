"""Tasks killed at every transition of a step, and at every event of a run: the last numbers are those of no kill."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType

import pytest

from lockstep.protocol import member
from lockstep.protocol.coordinator import coordinator_machine, running_job
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.coordinator.running_job import RunningJob
from lockstep.protocol.core.ids import BucketId, TaskId
from lockstep.protocol.core.ids import server as server_id
from lockstep.protocol.core.ids import worker as worker_id
from lockstep.protocol.core.machine import State, Trigger, advance
from lockstep.protocol.core.messages import Member, ParameterEntry, View
from lockstep.protocol.server import ledger
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker import holdings
from lockstep.sim.disk import SavedBucket, SavedShard
from lockstep.sim.kill_points import KillPoint, KillPoints, Moment
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile
from lockstep.sim.server_side import SimulatedServer
from lockstep.sim.violation import Rule, Violation
from lockstep.sim.world import World

CHIEF, WORKER, COORDINATOR, SERVER = worker_id(0), worker_id(1), server_id(0), server_id(1)
VICTIMS = (WORKER, CHIEF, SERVER, COORDINATOR)
RULES = RecoveryRules(on_worker_loss=LossPolicy.WAIT, rejoin_seconds=60.0, returns=True, save_steps=2, saves_last=True)
PLAIN = Scenario(
    seed=1,
    servers=2,
    workers=2,
    parameters=tuple(ParameterEntry(f"layer{n}", 16, "float32", 0) for n in range(3)),
    network=NetworkProfile(quiet_after=0.0),
    training=TrainingProfile(steps=6),
    rules=RULES,
)
LIBRARY = replace(PLAIN, mode=Mode.SEALED)
EARLY = replace(LIBRARY, training=replace(PLAIN.training, seals_early=True, backward=SecondsRange(0.0, 0.05)))
"""Buckets that follow the seal of their step, slowly."""
STORM = NetworkProfile(
    late_chance=0.03, in_order=False, duplicate_chance=0.1, reset_chance=0.01, transfer_failure_chance=0.02
)
STEP = 3
"""The step at whose transitions tasks are killed: version 2 is saved while it goes on."""
LAST_EVENTS = 20
"""A server that is killed after its last shard was saved is not missed: the job ends without its next incarnation."""
Walked = set[tuple[str, str]]
Signal = tuple[TaskId, int]


def played(
    scenario: Scenario, kills: Iterable[KillPoint] = (), signals: Iterable[Signal] = ()
) -> tuple[World, KillPoints]:
    world = World(scenario)
    points = KillPoints(world, kills, signals)
    assert world.run().ok
    return world, points


@functools.cache
def undisturbed(scenario: Scenario = PLAIN) -> tuple[dict[BucketId, int], list[Moment]]:
    world, points = played(scenario)
    return world.numbers(), points.moments


def play(*kills: KillPoint, scenario: Scenario = PLAIN) -> KillPoints:
    world, points = played(scenario, kills)
    assert world.numbers() == undisturbed()[0], kills
    return points


def kills_of(task: TaskId, step: int | None = None, scenario: Scenario = PLAIN) -> Iterator[KillPoint]:
    """Each event at which this task can be killed, before and after its effects: of one step, or of the whole run."""
    for moment in undisturbed(scenario)[1][:-LAST_EVENTS]:
        if moment.task == task and step in (None, moment.committed + 1):
            yield KillPoint(task, moment.event, False)
            yield KillPoint(task, moment.event, True)


def transitions_of_a_step(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[TaskId, int], Walked]:
    """For each event of the step: the rows of the transition tables that it walked."""
    found: dict[tuple[TaskId, int], Walked] = {}
    world = World(PLAIN)
    points = KillPoints(world)

    def watching(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger) -> State:
        now = points.now
        if now.committed + 1 == STEP:
            row = (f"{type(state).__module__}: {state.value}", trigger.value)
            found.setdefault((now.task, now.event), set()).add(row)
        return advance(table, state, trigger)

    modules: tuple[ModuleType, ...] = (holdings, ledger, running_job, coordinator_machine, member)
    for module in modules:
        monkeypatch.setattr(module, "advance", watching)
    world.run()
    monkeypatch.undo()
    return found


def test_an_undisturbed_run_is_the_same_each_time() -> None:
    assert played(PLAIN)[0].numbers() == undisturbed()[0]
    assert set(undisturbed()[0]) == {0, 1, 2}


def test_a_run_that_cannot_compute_a_step_again_cannot_recover() -> None:
    with pytest.raises(ValueError, match="computed again"):
        replace(PLAIN, training=TrainingProfile(absent_chance=0.1))
    with pytest.raises(ValueError, match="computed again"):
        replace(PLAIN, mode=Mode.ASYNC)


def test_killed_at_every_transition_of_a_step_no_gradient_is_lost_doubled_or_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = transitions_of_a_step(monkeypatch)
    walked = {row for rows in found.values() for row in rows}
    plain = {("collecting", "last gradient arrived"), ("complete", "applying began"), ("applying", "next version made")}
    assert {(f"{ledger.__name__}: {state}", trigger) for state, trigger in plain} <= walked
    plain = {("held", "gradient produced"), ("produced", "transfer started"), ("offered", "version arrived")}
    assert {(f"{holdings.__name__}: {state}", trigger) for state, trigger in plain} <= walked
    assert {who for who, _ in found} == set(VICTIMS)
    for who, event in found:
        for effects_done in (False, True):
            assert play(KillPoint(who, event, effects_done)).killed == 1


@pytest.mark.parametrize("victim", [SERVER, server_id(3)], ids=lambda t: t.short)
def test_a_server_without_a_bucket_does_not_keep_a_job_that_went_back_from_committing(victim: TaskId) -> None:
    crowded = replace(PLAIN, servers=4)
    numbers, moments = undisturbed(crowded)
    kill = next(moment for moment in moments if moment.task == victim and moment.committed == STEP)
    world, points = played(crowded, [KillPoint(victim, kill.event, False)])
    assert points.killed == 1
    assert world.numbers() == numbers


def test_the_library_ends_with_the_numbers_of_the_benchmark() -> None:
    assert undisturbed(LIBRARY)[0] == undisturbed()[0]


@pytest.mark.parametrize("scenario", [LIBRARY, EARLY], ids=["seals-last", "seals-early"])
@pytest.mark.parametrize("task", VICTIMS, ids=lambda t: t.short)
def test_killed_at_every_event_of_a_step_of_the_library_the_job_ends_with_the_same_numbers(
    task: TaskId, scenario: Scenario
) -> None:
    for kill in kills_of(task, STEP, scenario):
        assert play(kill, scenario=scenario).killed == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", VICTIMS, ids=lambda t: t.short)
def test_killed_at_every_event_of_a_run_the_job_ends_with_the_same_numbers(task: TaskId) -> None:
    for kill in kills_of(task):
        assert play(kill).killed == 1


def drawn_kills(seed: int, scenario: Scenario = PLAIN) -> list[KillPoint]:
    rng = random.Random(seed)
    moments = [rng.choice(undisturbed(scenario)[1]) for _ in range(rng.randint(2, 5))]
    return [KillPoint(moment.task, moment.event, rng.random() < 0.5) for moment in moments]


@pytest.mark.parametrize("seed", range(60))
def test_several_kills_in_one_run_change_no_number(seed: int) -> None:
    play(*drawn_kills(seed))


@pytest.mark.parametrize("seed", range(60))
def test_several_kills_on_a_bad_network_change_no_number(seed: int) -> None:
    lent = replace(STORM, lent_in_place=seed % 3 == 0, quiet_after=60.0)
    mode = (Mode.EAGER, Mode.SEALED)[seed % 2]
    play(*drawn_kills(seed), scenario=replace(PLAIN, seed=seed, network=lent, mode=mode))


@pytest.mark.parametrize("task", [WORKER, pytest.param(CHIEF, marks=pytest.mark.slow)], ids=lambda t: t.short)
def test_a_job_that_shrinks_ends_well_wherever_a_worker_is_killed(task: TaskId) -> None:
    rules = replace(RULES, on_worker_loss=LossPolicy.SHRINK)
    scenario = replace(PLAIN, rules=rules, workers=3, training=TrainingProfile(steps=25))
    for kill in kills_of(task, STEP, scenario):
        assert played(scenario, [kill])[1].killed == 1


# -- defects that the kills must find --


def defect_found_by_killing(*victims: TaskId, scenario: Scenario = PLAIN) -> Rule | None:
    for victim in victims:
        for kill in kills_of(victim, STEP, scenario):
            try:
                played(scenario, [kill])
            except Violation as violation:
                return violation.broken.rule
    return None


def test_a_commit_that_does_not_wait_for_the_states_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed(LIBRARY)
    monkeypatch.setattr(RunningJob, "_states_are_there", lambda *_: True)
    assert defect_found_by_killing(WORKER, scenario=LIBRARY) is Rule.NOT_REPEATED


def test_a_checkpoint_that_is_copied_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard is saved after the next update has begun: values of one version, the optimizer's state of another."""
    undisturbed()
    plain = SimulatedServer._write_shard

    def late(self: SimulatedServer, version: int, shard: SavedShard) -> None:
        def write() -> None:
            plain(self, version, {b: SavedBucket(saved.tag, self._momentum[b]) for b, saved in shard.items()})

        self._around.after(self.task, 0.1, write)

    monkeypatch.setattr(SimulatedServer, "_write_shard", late)
    assert defect_found_by_killing(SERVER, COORDINATOR) is Rule.NOT_REPEATED


def test_a_worker_that_begins_with_another_state_than_it_had_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed()
    monkeypatch.setattr(ServerMachine, "_forget_life", lambda *_: [])
    plain = RunningJob._view

    def other(self: RunningJob, task: TaskId, members: tuple[Member, ...]) -> View:
        view = plain(self, task, members)
        return replace(view, state=b"another state") if self._number > 1 else view

    monkeypatch.setattr(RunningJob, "_view", other)
    assert defect_found_by_killing(WORKER) is Rule.NOT_REPEATED


# -- SIGTERM: a whole job is shut down, and goes on from what was saved when it is started again --


def signalled(*signals: Signal, save_steps: int = 2) -> World:
    world, _ = played(replace(PLAIN, rules=replace(RULES, save_steps=save_steps)), signals=signals)
    assert world.numbers() == undisturbed()[0], signals
    return world


def events_of(task: TaskId) -> list[int]:
    return [moment.event for moment in undisturbed()[1] if moment.task == task]


def test_a_job_that_is_shut_down_after_any_event_and_started_again_has_the_same_last_numbers() -> None:
    saved: set[int] = set()
    for event in events_of(COORDINATOR)[::2]:
        signalled((COORDINATOR, event))
        saved |= set(signalled((COORDINATOR, event), save_steps=1000).disk.checkpoints)
    assert saved == set(range(1, PLAIN.training.steps + 1)), (
        "the step that goes on is finished and saved, whichever it is"
    )


def test_a_signal_that_comes_to_one_task_after_the_other_is_one_shutdown() -> None:
    chance = random.Random(5)
    for _ in range(60):
        signalled(*((task, chance.choice(events_of(task))) for task in VICTIMS))


@pytest.mark.parametrize("task", [WORKER, CHIEF, SERVER], ids=lambda t: t.short)
def test_one_task_that_leaves_after_any_event_changes_no_number(task: TaskId) -> None:
    for event in events_of(task)[::3]:
        signalled((task, event))
