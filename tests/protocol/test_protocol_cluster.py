"""Whole clusters of machines, under drawn networks: reordered, doubled, delayed, lost-then-repeated messages.

``World`` checks the invariants after each event (see ``lockstep.sim``): no gradient is lost, counted twice or mixed
between steps, senders, lives or editions; nobody overwrites what somebody reads; commits only go up and never come
early; somebody always has a deadline; and once the network is quiet the run ends.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol.ids import TaskId, server, worker
from lockstep.protocol.messages import Setting
from lockstep.sim.scenario import Kill, Mode, NetworkProfile, Scenario, TrainingProfile, default_parameters
from lockstep.sim.world import World
from protocol.scenarios import CUT, TWO_GROUPS, backup_clusters, clusters

QUIET = NetworkProfile(quiet_after=0.0)
BAD = NetworkProfile(
    late_chance=0.05, in_order=False, duplicate_chance=0.2, reset_chance=0.02, ghost_chance=0.1, quiet_after=60.0
)


@pytest.mark.parametrize("mode", Mode)
def test_every_run_over_a_bad_network_ends_well(mode: Mode) -> None:
    @settings(max_examples=60)
    @given(clusters(mode))
    def run(scenario: Scenario) -> None:
        assert World(scenario).run().ok

    run()


@settings(max_examples=60)
@given(backup_clusters())
def test_every_run_with_backup_workers_ends_well(scenario: Scenario) -> None:
    assert World(scenario).run().ok


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 3)])
def test_every_shape_and_mode_ends_well_on_a_quiet_network_without_a_drop(
    mode: Mode, servers: int, workers: int
) -> None:
    scenario = Scenario(seed=1, servers=servers, workers=workers, mode=mode, network=QUIET, parameters=TWO_GROUPS)
    result = World(scenario).run()
    assert result.ok
    assert result.dropped == 0
    assert {outcome.step for outcome in result.outcomes.values()} == {3}


def test_more_servers_than_buckets_do_not_hold_anybody_up() -> None:
    scenario = Scenario(seed=2, servers=3, workers=2, network=BAD, parameters=CUT[:1])
    assert World(scenario).run().ok


def test_a_model_without_parameters_ends_well() -> None:
    assert World(Scenario(seed=3, servers=2, workers=2, parameters=(), network=BAD)).run().ok


def test_the_network_of_these_tests_is_as_bad_as_it_says() -> None:
    """Otherwise the properties above would be proven in fine weather."""
    results = [World(Scenario(seed=seed, servers=2, workers=3, network=BAD)).run() for seed in range(10)]
    assert all(result.ok for result in results)
    assert sum(result.traffic.resets for result in results) > 20
    assert sum(result.traffic.lost for result in results) > 20
    assert sum(result.traffic.doubled for result in results) > 200
    assert sum(result.dropped for result in results) > 100


# -- jobs that must end badly, and with whose name --


def culprits(scenario: Scenario) -> dict[TaskId, str]:
    result = World(scenario).run()
    assert not any(outcome.ok for outcome in result.outcomes.values())
    return {task: outcome.culprit for task, outcome in result.outcomes.items()}


def test_killing_any_task_at_any_moment_ends_the_job_on_every_other_task_with_its_name() -> None:
    @settings(max_examples=40)
    @given(st.integers(0, 2**32), st.integers(0, 4), st.floats(1.2, 6.0), st.sampled_from(Mode))
    def run(seed: int, victim: int, at: float, mode: Mode) -> None:
        # Steps are so long that the job cannot have ended before.
        scenario = Scenario(seed=seed, servers=2, workers=3, mode=mode, training=TrainingProfile(steps=2000))
        killed = scenario.shape.tasks()[victim]
        named = culprits(replace(scenario, kills=(Kill(killed, at),)))
        assert set(named) == set(scenario.shape.tasks()) - {killed}
        assert set(named.values()) == {str(killed)}

    run()


def test_a_task_that_never_starts_is_named_by_everybody_after_the_startup_timeout() -> None:
    scenario = Scenario(
        seed=5, servers=2, workers=2, network=QUIET, absentees=(worker(1),), startup_timeout=30.0, patience=60.0
    )
    result = World(scenario).run()
    assert len(result.outcomes) == 3
    for outcome in result.outcomes.values():
        assert outcome.culprit == str(worker(1))
        assert "the cluster was not complete after 30 s; missing: worker 1" in outcome.reason.text
    assert result.missing[worker(0)] == (str(worker(1)),)


def test_a_coordinator_that_never_starts_is_named_by_everybody() -> None:
    scenario = Scenario(
        seed=6, servers=2, workers=2, network=QUIET, absentees=(server(0),), startup_timeout=30.0, patience=60.0
    )
    result = World(scenario).run()
    assert {outcome.culprit for outcome in result.outcomes.values()} == {str(server(0))}
    assert {outcome.reason.text for outcome in result.outcomes.values()} == {"could not be reached within 30 s"}


@pytest.mark.parametrize("network", [QUIET, BAD])
def test_a_task_with_another_setting_ends_the_job_and_the_setting_is_named(network: NetworkProfile) -> None:
    odd = ((worker(1), Setting("optimizer", "adam")),)
    result = World(Scenario(seed=7, workers=2, network=network, odd_settings=odd)).run()
    reasons = {outcome.reason.text for outcome in result.outcomes.values()}
    assert len(reasons) == 1
    assert "optimizer=adam" in reasons.pop()
    assert len(result.outcomes) == 3


@pytest.mark.parametrize("network", [QUIET, BAD])
def test_a_worker_with_another_model_ends_the_job_and_the_first_parameter_is_named(network: NetworkProfile) -> None:
    result = World(Scenario(seed=8, servers=2, workers=2, network=network, odd_models=(worker(1),))).run()
    name = default_parameters()[0].name
    for outcome in result.outcomes.values():
        assert outcome.culprit == str(worker(1))
        assert f"parameter 0 is '{name}' (24 x float32, group 0) on one side" in outcome.reason.text


@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.SEALED])
@pytest.mark.parametrize("network", [QUIET, BAD])
def test_workers_with_different_numbers_of_steps_end_the_job_and_are_named(mode: Mode, network: NetworkProfile) -> None:
    scenario = Scenario(seed=9, servers=2, workers=2, mode=mode, network=network, odd_steps=((worker(1), 2),))
    result = World(scenario).run()
    for outcome in result.outcomes.values():
        assert outcome.culprit == str(worker(1))
        assert "stopped after 2 steps while worker 0 goes on with step 2" in outcome.reason.text


def test_without_synchronisation_workers_may_do_different_numbers_of_steps() -> None:
    scenario = Scenario(seed=10, workers=3, mode=Mode.ASYNC, network=BAD, odd_steps=((worker(1), 1), (worker(2), 6)))
    assert World(scenario).run().ok
