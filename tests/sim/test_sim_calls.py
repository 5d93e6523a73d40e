"""Calls that all workers make, in whole simulated runs: over bad networks, and with workers that are killed in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.coordinator.calls import Calls
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import worker as worker_id
from lockstep.sim.kill_points import KillPoint, KillPoints
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, TrainingProfile
from lockstep.sim.violation import Violation
from lockstep.sim.world import World

STORM = NetworkProfile(
    late_chance=0.03, in_order=False, duplicate_chance=0.1, reset_chance=0.01, transfer_failure_chance=0.02
)
TALKING = TrainingProfile(steps=4, calls=True)
WAIT = RecoveryRules(on_worker_loss=LossPolicy.WAIT, rejoin_seconds=60.0)
SHRINK = replace(WAIT, on_worker_loss=LossPolicy.SHRINK)
LIBRARY = Scenario(seed=1, mode=Mode.SEALED, network=NetworkProfile(quiet_after=0.0), training=TALKING, rules=WAIT)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.SEALED, Mode.ASYNC])
def test_all_workers_get_the_same_answers_over_a_bad_network(servers: int, mode: Mode) -> None:
    if not servers and not mode.synchronous:
        pytest.skip("without servers steps are synchronous")
    for seed in range(5):
        assert (
            World(Scenario(seed=seed, servers=servers, workers=3, mode=mode, network=STORM, training=TALKING)).run().ok
        )


def numbers_of(scenario: Scenario, *kills: KillPoint) -> dict[int, int]:
    world = World(scenario)
    KillPoints(world, kills)
    assert world.run().ok, kills
    return world.numbers()


@pytest.mark.parametrize("task", [0, 1])
def test_a_worker_that_is_killed_at_any_event_comes_back_to_the_same_answers(task: int) -> None:
    world = World(LIBRARY)
    points = KillPoints(world)
    assert world.run().ok
    expected = world.numbers()
    moments = [moment for moment in points.moments[:-20] if moment.task == worker_id(task)]
    assert len(moments) > 40
    for moment in moments[task::3]:
        assert numbers_of(LIBRARY, KillPoint(moment.task, moment.event, bool(moment.event % 2))) == expected


@pytest.mark.parametrize("victim", [0, 2])
def test_a_job_that_goes_on_without_a_worker_answers_without_it_and_takes_it_back(victim: int) -> None:
    scenario = replace(LIBRARY, workers=3, rules=SHRINK)
    world = World(scenario)
    points = KillPoints(world)
    assert world.run().ok
    moments = [moment for moment in points.moments[:-20] if moment.task == worker_id(victim)]
    for moment in moments[::5]:
        numbers_of(scenario, KillPoint(moment.task, moment.event, True))


def test_a_worker_that_finishes_early_is_named_by_its_call() -> None:
    world = World(replace(LIBRARY, rules=RecoveryRules(), odd_steps=((worker_id(1), 2),)))
    assert not world.run().ok
    outcome = world.tasks[worker_id(0)].outcome
    assert outcome is not None
    assert (outcome.reason.cause, outcome.culprit) == (Cause.OTHER_CALL, str(worker_id(1)))


def test_a_coordinator_that_forgets_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.protocol.coordinator.calls.STEPS_BEHIND", 0)
    with pytest.raises((Violation, AssertionError)):
        test_a_worker_that_is_killed_at_any_event_comes_back_to_the_same_answers(1)


def test_a_coordinator_that_answers_before_all_have_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Calls._missing
    monkeypatch.setattr(Calls, "_missing", lambda self, workers: missing(self, workers)[1:])
    with pytest.raises((Violation, KeyError)):
        World(LIBRARY).run()
