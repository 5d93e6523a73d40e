"""The same fault values in simulated clusters: the real machines, the same verdicts, thousands of times faster."""

from __future__ import annotations

import pytest

from helpers.playing import run_until
from lockstep.diagnose.analyse import analyse
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import DropMessage, DropTensor, EndEarly, Fault, OddModel, OddSetting, OddVersion
from lockstep.protocol.core.ids import server, worker
from lockstep.sim.evidence import evidence_of
from lockstep.sim.planting import plant, with_faults
from lockstep.sim.scenario import NetworkProfile, Scenario, TrainingProfile
from lockstep.sim.world import World

PS0, W1 = str(server(0)), str(worker(1))
STEP = 2
SCENARIO = Scenario(seed=3, training=TrainingProfile(steps=6), network=NetworkProfile(quiet_after=0.0))


def stands_still(world: World) -> bool:
    """A server has waited for four seconds."""
    now = world.agenda.now
    waits = [wait for task in world.tasks.values() if task.lives for wait in task.machine.waits()]
    return any(wait.step >= STEP and now - wait.since >= 4.0 for wait in waits)


@pytest.mark.parametrize(
    ("fault", "cause", "key"),
    [
        (DropMessage(PS0, W1, "Open", STEP), Cause.REQUEST_LOST, "gradient/bucket_"),
        (DropMessage(W1, PS0, "Pull", STEP), Cause.REQUEST_LOST, "parameter/bucket_"),
        (DropTensor(W1, PS0, STEP, 0, times=0), Cause.ANSWER_LOST, "gradient/bucket_0"),
        (DropTensor(PS0, W1, STEP + 1, 1, times=0), Cause.ANSWER_LOST, "parameter/bucket_1"),
    ],
    ids=["open", "pull", "gradient", "parameter"],
)
def test_what_is_lost_in_the_simulator_gets_the_verdict_of_a_real_cluster(fault: Fault, cause: Cause, key: str) -> None:
    world = World(with_faults(SCENARIO, [fault]))
    plant(world, [fault])
    assert run_until(world, stands_still, 100.0)
    verdict = analyse(evidence_of(world)).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.pair(), verdict.step) == (cause, frozenset({PS0, W1}), STEP)
    assert key in verdict.key


@pytest.mark.parametrize("fault", [DropMessage(W1, PS0, "Pull", STEP, times=2), DropTensor(W1, PS0, STEP, 0, times=1)])
def test_a_loss_that_ends_heals_by_itself(fault: Fault) -> None:
    world = World(SCENARIO)
    plant(world, [fault])
    result = world.run()
    assert result.ok
    assert result.seconds > 2.0, "it took a repetition"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (EndEarly(W1, 3), "give every worker the same number of steps"),
        (OddSetting(W1), "start all tasks with the same value"),
        (OddModel(W1), "differs from the chief's"),
    ],
    ids=["steps", "setting", "model"],
)
def test_what_a_task_is_can_be_wrong_too(fault: Fault, words: str) -> None:
    result = World(with_faults(SCENARIO, [fault])).run()
    assert not result.ok
    assert any(words in outcome.reason.text for outcome in result.outcomes.values())


def test_a_fault_of_a_handshake_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="OddVersion shows in the handshake of two processes"):
        with_faults(SCENARIO, [OddVersion(W1)])
