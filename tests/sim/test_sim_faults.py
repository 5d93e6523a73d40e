"""Planted faults: each run ends as its fault demands, in bounded virtual time, and names the task that was hit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import (
    BlockCallback,
    BlockLoop,
    Die,
    DropMessage,
    DropTensor,
    EndEarly,
    FaultPlace,
    Freeze,
    OddSetting,
    Raise,
    SlowSteps,
    SlowStore,
    Stick,
)
from lockstep.protocol.core.ids import server, worker
from lockstep.sim.explore import Played, play, play_seed
from lockstep.sim.faults import (
    AnyFault,
    Crash,
    LoseConnection,
    Partition,
    Pause,
    StartLate,
    end_of,
    parse_fault,
    to_text,
)
from lockstep.sim.generate import DrawnRun, Size
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile

PS0, PS1, W0, W1 = str(server(0)), str(server(1)), str(worker(0)), str(worker(1))
SCENARIO = Scenario(
    seed=5,
    servers=2,
    workers=3,
    training=TrainingProfile(steps=6, forward=SecondsRange(0.3, 0.5)),
    network=NetworkProfile(quiet_after=0.0),
    startup_timeout=40.0,
    patience=150.0,
)


def run(*faults: AnyFault, scenario: Scenario = SCENARIO) -> Played:
    played = play(DrawnRun(scenario, faults))
    assert played.sound, played.headline
    return played


MORTAL: list[tuple[AnyFault, Cause]] = [
    (Die(W1, 2), Cause.DEAD),
    (Die(PS1, 2), Cause.DEAD),
    (Die(PS0, 2), Cause.DEAD),
    (Die(W1, 2, signum=0, exit_code=3), Cause.DEAD),
    (Crash(W0, 3.1), Cause.DEAD),
    (Freeze(W1, 2), Cause.FROZEN),
    (Freeze(PS1, 2), Cause.FROZEN),
    (Freeze(PS0, 2), Cause.FROZEN),
    (StartLate(W1), Cause.NEVER_STARTED),
    (StartLate(PS0), Cause.NEVER_STARTED),
    (Partition(W1, PS0, 2.5), Cause.LINK_DOWN),
    (Partition(PS1, W1, 2.5, one_way=True), Cause.ONE_WAY_LINK),
    (DropMessage(PS1, W1, "Open", 2), Cause.REQUEST_LOST),
    (DropTensor(W1, PS1, 2, times=0), Cause.ANSWER_LOST),
    (OddSetting(W1), Cause.MISMATCH),
    (Raise(W1, 2), Cause.FAILED),
    (Stick(W1, FaultPlace.USER_CODE.value, 2, 1000.0), Cause.USER_CODE),
    (Stick(W1, FaultPlace.INPUT.value, 2, 1000.0), Cause.INPUT_STARVED),
    (BlockLoop(W1, 2, 1000.0), Cause.COMMUNICATION),
    (BlockCallback(PS1, W1, step=2, seconds=1000.0), Cause.COMMUNICATION),
]


@pytest.mark.parametrize(("fault", "cause"), MORTAL, ids=lambda one: str(one)[:40])
def test_a_fault_that_does_not_heal_ends_the_job_with_its_name(fault: AnyFault, cause: Cause) -> None:
    played = run(fault)
    assert played.ending is not None
    assert not played.ending.completed
    assert played.ending.cause == cause.value
    pair = {fault.task, getattr(fault, "peer", fault.task)}
    assert played.ending.culprit in pair
    assert played.struck == (fault,)
    assert played.seconds < 150.0


@pytest.mark.parametrize(
    "fault",
    [
        Pause(W1, 2.0, 20.0),
        Pause(PS0, 2.0, 20.0),
        Partition(W1, PS1, 2.0, 20.0),
        Partition(PS0, W1, 2.0, 20.0, one_way=True),
        LoseConnection(W1, PS0, 2.2),
        StartLate(PS0, 20.0),
        StartLate(W1, 20.0),
        DropMessage(W1, PS0, "Pull", 2, times=2),
        DropTensor(W1, PS0, 2, times=1),
        SlowSteps(W1, 2, 8.0),
        SlowStore(PS1, 2, 4.0),
        Stick(W1, FaultPlace.USER_CODE.value, 2, 20.0),
        BlockLoop(PS1, 0, 20.0),
        BlockCallback(W1, PS0, step=2, seconds=15.0),
    ],
    ids=lambda one: str(one)[:40],
)
@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.ASYNC_SEALED])
def test_a_fault_that_ends_only_delays_the_job(fault: AnyFault, mode: Mode) -> None:
    undisturbed = run(scenario=replace(SCENARIO, mode=mode))
    played = run(fault, scenario=replace(SCENARIO, mode=mode))
    assert played.ending is not None
    assert played.ending.completed
    assert played.struck == (fault,)
    assert played.seconds >= undisturbed.seconds


def test_a_task_that_is_killed_and_started_again_is_named() -> None:
    for after in (0.1, 2.0, 10.0):
        played = run(Crash(W1, 3.0, restart_after=after))
        assert played.ending is not None
        assert W1 in f"{played.ending.culprit} {played.ending.reason}"


def test_what_comes_to_a_frozen_task_is_seen_when_it_goes_on() -> None:
    """Also the news that a link broke, and of the one that took its place."""
    played = run(Pause(W1, 2.0, 10.0), LoseConnection(W0, PS0, 3.0), LoseConnection(PS1, W1, 4.0))
    assert played.ending is not None
    assert played.ending.completed


@pytest.mark.parametrize(
    "fault",
    [Crash(W1, 3.5, 2.0), Pause(W1, 1.0, 2.0), Partition(W1, PS0, 1.0, one_way=True), LoseConnection(W1, PS0, 2.0)],
)
def test_a_fault_can_be_printed_and_read_back(fault: AnyFault) -> None:
    assert parse_fault(to_text(fault)) == fault


def test_faults_of_a_real_cluster_have_the_same_printed_form() -> None:
    assert parse_fault(to_text(Freeze(W1, 3))) == Freeze(W1, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "a fault must be a JSON object"),
        ('{"fault": "Nothing"}', "the simulator also has: Crash, Pause, Partition"),
        ('{"fault": "Pause", "task": 3}', "Pause.task must be of type str"),
        ('{"fault": "Pause", "task": "x"}', "Pause is missing a field"),
        ('{"fault": "Pause", "where": "x"}', "Pause has no field 'where'"),
    ],
)
def test_what_is_no_fault_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_fault(text)


def test_the_end_of_a_fault_is_known() -> None:
    assert end_of(Pause(W1, 2.0, 3.0)) == 5.0
    assert end_of(Partition(W1, PS0, 2.0)) == 2.0
    assert end_of(Freeze(W1)) == 0.0


def test_a_seed_repeats_a_drawn_run_exactly() -> None:
    for seed in range(4):
        assert play_seed(seed, Size()) == play_seed(seed, Size())


def test_drawn_runs_are_sound() -> None:
    """The first of the seeds that ``make test-slow`` plays by the hundred."""
    for seed in range(10):
        played = play_seed(seed, Size())
        assert played.sound, f"seed {seed}: {played.headline}"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_hundreds_of_drawn_runs_are_sound() -> None:
    broken = {seed: played.headline for seed in range(600) if not (played := play_seed(seed, Size())).sound}
    assert not broken


def test_an_async_chief_without_a_single_step_does_not_hold_up_the_others() -> None:
    scenario = replace(SCENARIO, mode=Mode.ASYNC)
    played = run(EndEarly(W0, 0), scenario=scenario)
    assert played.ending is not None
    assert played.ending.completed
