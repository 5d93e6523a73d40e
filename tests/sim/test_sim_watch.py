"""The watchdog of a simulated cluster: the real analysis, shown what every task and its monitor would answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.playing import run_until
from lockstep.diagnose.analyse import analyse
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import DropMessage, DropTensor
from lockstep.protocol.core.ids import server, worker
from lockstep.sim.evidence import evidence_of
from lockstep.sim.explore import play
from lockstep.sim.faults import AnyFault, Pause
from lockstep.sim.generate import DrawnRun
from lockstep.sim.planting import plant
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile
from lockstep.sim.watch import SimulatedWatchdog
from lockstep.sim.world import World

PS0, W1 = str(server(0)), str(worker(1))
SCENARIO = Scenario(
    seed=2,
    servers=2,
    workers=3,
    training=TrainingProfile(steps=8, forward=SecondsRange(0.3, 0.5)),
    network=NetworkProfile(quiet_after=0.0),
    startup_timeout=40.0,
)


def watched(*faults: AnyFault, scenario: Scenario = SCENARIO) -> tuple[World, SimulatedWatchdog]:
    world = World(scenario)
    plant(world, faults)
    watch = SimulatedWatchdog(world)
    watch.begin()
    return world, watch


@pytest.mark.parametrize("mode", Mode)
def test_nothing_is_said_of_a_healthy_run(mode: Mode) -> None:
    world, watch = watched(scenario=replace(SCENARIO, mode=mode))
    assert world.run().ok
    assert (watch.finding, watch.noticed, watch.left_behind) == (None, [], set())


def test_what_heals_is_named_while_it_lasts_and_does_not_end_the_job() -> None:
    world, watch = watched(Pause(W1, 2.0, 29.3))
    assert world.run().ok
    assert watch.finding is None
    assert {(one.verdict.cause, one.verdict.culprit) for one in watch.noticed} == {(Cause.FROZEN, W1)}
    assert watch.noticed[0].still < 8.0


def test_a_lost_value_of_asynchronous_training_is_no_deadlock() -> None:
    """Buckets have no version of their own there; the server that asks for the next gradient has made the value."""
    fault = DropTensor(PS0, W1, 2, times=0)
    played = play(DrawnRun(replace(SCENARIO, mode=Mode.ASYNC), (fault,)))
    assert played.sound, played.headline
    assert played.ending is not None
    assert played.ending.cause == Cause.ANSWER_LOST.value


def test_a_task_that_never_hears_that_the_cluster_is_complete_is_in_no_deadlock() -> None:
    """It waits for the coordinator's word, and not for what the coordinator waits for as a server."""
    world, _ = watched(DropMessage(PS0, W1, "View", times=0))
    assert run_until(world, lambda world: world.agenda.now > 15.0, 30.0)
    verdict = analyse(evidence_of(world)).verdict
    assert verdict is not None
    assert verdict.cause is not Cause.DEADLOCK
    assert verdict.pair() == {PS0, W1}


def test_a_run_that_stalls_without_a_planted_cause_is_a_finding_about_the_protocol() -> None:
    """The judge must not take "unknown", or any verdict, for an answer where nothing was planted."""
    world, watch = watched()
    # Something outside of the plan: every commit is lost.
    world.network.loses_message = lambda _sender, _receiver, message: type(message).__name__ == "Commit"
    world.run()
    assert watch.finding is not None
    assert watch.finding.still <= SCENARIO.stall_after + 5.0
    outcomes = {task.outcome.culprit for task in world.tasks.values() if task.outcome is not None}
    assert outcomes <= {str(server(0)), str(server(1))}
