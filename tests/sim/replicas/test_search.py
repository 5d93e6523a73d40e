"""What ``lockstep sim --server_replicas=1`` plays: kills at every event, or at every two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.core.ids import server
from lockstep.protocol.server.second_shard import SecondShard
from lockstep.sim.replicas.search import (
    KillAtEvent,
    ReplicaScenario,
    ReplicaTally,
    first_kills,
    search_one,
    search_two,
    ways,
)
from lockstep.sim.violation import Rule

from .replica_mutants import second_home_makes_it_with_other_rates

SMALL = ReplicaScenario(buckets=3)


def test_the_last_numbers_do_not_depend_on_the_order_of_events() -> None:
    runs = [replace(SMALL, seed=seed).world() for seed in range(6)]
    for world in runs:
        world.run()
    assert all(world.numbers() == runs[0].numbers() for world in runs)
    assert len({tuple(world.history) for world in runs}) == len(runs)


@pytest.mark.parametrize("saves", [False, True])
def test_one_kill_is_not_noticed(saves: bool) -> None:
    for scenario in ways(replace(SMALL, saves=saves)):
        tally = search_one(scenario, stride=23)
        assert not tally.broken, str(tally.broken[0][1])
        assert tally.takeovers
        if scenario.servers_return:
            assert set(tally.endings) == {"completed"}


@pytest.mark.parametrize("first", [30, 80, 110])
def test_two_kills_break_no_rule(first: int) -> None:
    for scenario in ways(SMALL):
        tally = search_two(scenario, first_kills(ReplicaTally(), scenario)[first], stride=19)
        assert tally.runs > 5
        assert not tally.broken, str(tally.broken[0][1])


@pytest.mark.parametrize("saves", [False, True])
def test_both_homes_may_be_lost_only_while_the_job_says_that_it_has_no_replica(saves: bool) -> None:
    """With checkpoints all go back then, without nobody does."""
    scenario = replace(SMALL, servers_return=False, saves=saves)
    formed = scenario.world()
    formed.run()
    middle = [event for task, event in formed.history[formed.formed_at :] if task == server(1)][10]
    tally = search_two(scenario, KillAtEvent(server(1), middle, leaves=True))
    assert not tally.broken
    assert tally.endings["was killed by signal 9"] > 10, "the other server is lost too"


def test_a_defect_that_only_a_loss_shows_is_found_with_its_rule_and_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecondShard, "_make_next", second_home_makes_it_with_other_rates)
    tally = search_one(SMALL, stride=5)
    scenario, found = tally.broken[0]
    assert {broken.broken.rule for _, broken in tally.broken} == {Rule.NOT_REPEATED}
    assert scenario.kills
    assert found.story


def test_a_large_job_is_given_the_events_that_it_needs() -> None:
    tally = ReplicaTally()
    assert len(first_kills(tally, ReplicaScenario(servers=4, workers=8, steps=20, buckets=5))) > 6_000
    assert not tally.broken


def test_a_rule_that_is_broken_without_a_kill_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.sim.replicas.world.LEAST_LIMIT", 10)
    monkeypatch.setattr("lockstep.sim.replicas.world.EVENTS_OF_TASK", 1)
    tally = search_one(SMALL)
    assert (tally.runs, len(tally.broken)) == (1, 1)
