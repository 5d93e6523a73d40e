"""Simulated clusters without servers: drawn networks, drawn faults, and ranks killed at every event of a run."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.coordinator.running_job import RunningJob
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import DropMessage, DropTensor, SlowStore, Stick
from lockstep.protocol.core.ids import TaskId, worker
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.sim.disk import Disk
from lockstep.sim.explore import play_seed
from lockstep.sim.faults import AnyFault
from lockstep.sim.generate import Size
from lockstep.sim.kill_points import KillPoint, KillPoints, Moment
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, TrainingProfile
from lockstep.sim.task import SimTask
from lockstep.sim.violation import Rule, Violation
from lockstep.sim.world import World
from protocol.scenarios import TWO_GROUPS, clusters

plain_beginning = Disk.beginning
QUIET = NetworkProfile(quiet_after=0.0)
W0, W1 = str(worker(0)), str(worker(1))


@settings(max_examples=60, deadline=None)
@given(clusters(Mode.EAGER, Mode.SEALED), st.integers(1, 4))
def test_every_run_over_a_bad_network_ends_well(scenario: Scenario, workers: int) -> None:
    assert World(replace(scenario, servers=0, workers=workers)).run().ok


@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.SEALED])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_every_number_of_ranks_ends_well_on_a_quiet_network_without_a_drop(mode: Mode, workers: int) -> None:
    result = World(Scenario(seed=1, servers=0, workers=workers, mode=mode, network=QUIET, parameters=TWO_GROUPS)).run()
    assert result.ok
    assert result.dropped == 0
    assert {outcome.step for outcome in result.outcomes.values()} == {3}


def test_the_first_rank_saves_and_the_job_ends_well() -> None:
    rules = RecoveryRules(save_steps=2, saves_last=True)
    world = World(Scenario(seed=1, servers=0, workers=3, rules=rules, training=TrainingProfile(steps=5)))
    assert world.run().ok
    assert sorted(world.disk.checkpoints) == [2, 4, 5]


def test_without_servers_steps_are_of_all_and_nobody_comes_back_into_one() -> None:
    with pytest.raises(ValueError, match="none comes back into its step"):
        Scenario(seed=1, servers=0, mode=Mode.ASYNC)
    with pytest.raises(ValueError, match="none comes back into its step"):
        Scenario(seed=1, servers=0, rules=RecoveryRules(on_worker_loss=LossPolicy.WAIT))


@pytest.mark.parametrize("workers", [2, 3])
def test_drawn_faults_are_named(workers: int) -> None:
    """What ``lockstep sim --seeds --ps=0`` plays: a verdict names the rank that was hit, or the two."""
    for seed in range(60):
        played = play_seed(seed, Size(workers=workers, servers=0))
        assert played.sound, (seed, played.faults, played.headline)


NAMED: list[tuple[AnyFault, Cause]] = [
    (DropTensor(W1, W0, 1, -1, 0), Cause.ANSWER_LOST),
    (DropMessage(W1, W0, "Pull", 1, 0), Cause.REQUEST_LOST),
    (DropMessage(W0, W1, "Open", 1, 0), Cause.REQUEST_LOST),
    (Stick(W1, "user code", 1, 1000.0), Cause.USER_CODE),
    (Stick(W0, "input", 1, 1000.0), Cause.INPUT_STARVED),
    (SlowStore(W1, 1, 1000.0, busy=False), Cause.COMMUNICATION),
]


@pytest.mark.parametrize(("fault", "cause"), NAMED, ids=lambda one: type(one).__name__)
def test_what_happens_to_a_rank_is_named_and_no_server_is(fault: AnyFault, cause: Cause) -> None:
    played = play_seed(3, Size(workers=3, servers=0), [fault])
    assert played.sound, played.headline
    assert played.ending is not None
    assert (played.ending.cause, "server" in played.ending.reason, "ps" in played.ending.culprit) == (
        cause.value,
        False,
        False,
    )


class KillsAt:
    """Kills one task at one of its events, before its effects are carried out."""

    def __init__(self, world: World, victim: TaskId, event: int) -> None:
        self._world, self._victim, self._left = world, victim, event
        self.killed = False
        world.interrupter = self

    def event_begins(self, task: SimTask) -> None:
        self._left -= task.machine.task == self._victim

    def kills_before_effects(self, task: SimTask) -> bool:
        home = self._world.tasks[self._world.scenario.shape.coordinator].machine.coordinator
        decided = home is not None and home.end is not None
        if self.killed or decided or task.machine.task != self._victim or self._left >= 0:
            return False
        self.killed = True
        self._world.kill(task, "was killed by signal 9", -9)
        return True

    def event_ended(self, task: SimTask) -> None: ...


@pytest.mark.parametrize("victim", [worker(0), worker(2)], ids=lambda task: task.short)
def test_a_rank_killed_at_any_event_ends_the_job_by_name(victim: TaskId) -> None:
    events, struck = range(0, 200, 3), 0
    for event in events:
        world = World(Scenario(seed=5, servers=0, workers=3, network=QUIET, startup_timeout=20.0))
        kill = KillsAt(world, victim, event)
        result = world.run()
        if not kill.killed:
            assert result.ok
            continue
        struck += 1
        for task, outcome in result.outcomes.items():
            # Before the cluster is complete, a rank that never joined is missing rather than dead.
            assert not outcome.ok
            assert outcome.culprit == str(victim), (event, task, outcome)
            assert outcome.reason.cause in (Cause.DEAD, Cause.NEVER_STARTED), (event, task, outcome)
    assert struck > 30


# -- a job that goes back to its newest checkpoint when a rank is lost --

GOES_BACK = Scenario(
    seed=1,
    servers=0,
    workers=2,
    parameters=tuple(ParameterEntry(f"layer{n}", 16, "float32", 0) for n in range(3)),
    network=QUIET,
    training=TrainingProfile(steps=4),
    rules=RecoveryRules(rejoin_seconds=60.0, returns=True, save_steps=2, saves_last=True),
)
LAST_EVENTS = 12
"""A rank that is killed when all steps are made and saved is not missed: the job ends without its next incarnation."""


def disturbed(scenario: Scenario, kills: Iterable[KillPoint] = ()) -> tuple[World, KillPoints]:
    world = World(scenario)
    points = KillPoints(world, kills)
    assert world.run().ok
    return world, points


@functools.cache
def undisturbed(scenario: Scenario) -> tuple[dict[int, int], list[Moment]]:
    world, points = disturbed(scenario)
    return world.numbers(), points.moments[:-LAST_EVENTS]


@pytest.mark.parametrize(("ranks", "every"), [(2, 11), pytest.param(2, 1, marks=pytest.mark.slow), (3, 37), (4, 41)])
def test_a_rank_killed_at_any_event_takes_the_job_back_and_changes_no_number(ranks: int, every: int) -> None:
    """Also where there are more ranks than buckets: some hold none, and must not keep the next life from committing."""
    scenario = replace(GOES_BACK, workers=ranks)
    numbers, moments = undisturbed(scenario)
    assert {moment.task for moment in moments[::every]} == set(scenario.shape.worker_ids())
    for moment in moments[::every]:
        for effects_done in (False, True):
            world, points = disturbed(scenario, [KillPoint(moment.task, moment.event, effects_done)])
            assert points.killed == 1
            assert world.numbers() == numbers, moment


@pytest.mark.parametrize("seed", range(12))
def test_several_kills_of_ranks_on_a_bad_network_change_no_number(seed: int) -> None:
    plain = replace(GOES_BACK, workers=2 + seed % 2)
    storm = NetworkProfile(late_chance=0.03, in_order=False, duplicate_chance=0.1, reset_chance=0.01, quiet_after=60.0)
    rng = random.Random(seed)
    moments = [rng.choice(undisturbed(plain)[1]) for _ in range(rng.randint(2, 4))]
    kills = [KillPoint(moment.task, moment.event, rng.random() < 0.5) for moment in moments]
    network, mode = (QUIET, storm)[seed % 4 > 1], (Mode.EAGER, Mode.SEALED)[seed % 3 == 0]
    world, _ = disturbed(replace(plain, seed=seed, network=network, mode=mode), kills)
    assert world.numbers() == undisturbed(plain)[0]


def defect_found(first: int, every: int) -> Rule | str | None:
    """What is found by kills after the commit of step ``first``."""
    moments = [moment for moment in undisturbed(GOES_BACK)[1] if moment.committed >= first]
    for moment in moments[::every]:
        try:
            disturbed(GOES_BACK, [KillPoint(moment.task, moment.event, effects_done=True)])
        except Violation as violation:
            return violation.broken.rule
        except AssertionError:
            return "failed"
    return None


def test_a_checkpoint_before_every_rank_has_told_its_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed(GOES_BACK)
    monkeypatch.setattr(RunningJob, "_states_are_there", lambda *_: True)
    assert defect_found(0, 1) is Rule.EARLY_COMMIT


def test_a_job_that_begins_again_with_other_states_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed(GOES_BACK)
    monkeypatch.setattr(Disk, "beginning", lambda disk: replace(plain_beginning(disk), states={0: b"another"}))
    assert defect_found(2, 5) is Rule.NOT_REPEATED
