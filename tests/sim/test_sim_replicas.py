"""Jobs with second homes: kills at every event, cuts, broken links; and the defects that this must find."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import cache

import pytest

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import Role, TaskId, server, worker
from lockstep.protocol.core.machine import State, Trigger, advance
from lockstep.protocol.replication import coordination, shard_home
from lockstep.sim.replicas.search import KILLS, play, points_of, search_one, search_two
from lockstep.sim.replicas.world import Harm, HarmPoint, ReplicaMaker, ReplicaScenario, ReplicaWorld
from lockstep.sim.violation import Violation
from sim.replica_mutants import DIRECTED, FOUND_AT, MODULES, MUTANTS, MutantMaker

SMALL = ReplicaScenario(seed=3, buckets=2, steps=2)
ANY_HARM = (*KILLS, *KILLS, Harm.BREAK, Harm.CUT)
MOST_TRIES = 400


@cache
def moments(seed: int, servers: int) -> tuple[tuple[TaskId, int], ...]:
    return ReplicaWorld(ReplicaScenario(seed=seed, servers=servers)).run().moments


def harmed(draw: random.Random) -> ReplicaScenario:
    """A run with up to three harms, at events that a run without any would have."""
    scenario = ReplicaScenario(
        seed=draw.randrange(3),
        servers=draw.choice((2, 2, 3)),
        proof_passes=draw.random() < 0.5,
        servers_return=draw.random() < 0.8,
    )
    chosen = draw.sample(moments(scenario.seed, scenario.servers), draw.choice((1, 2, 2, 3)))
    points = [HarmPoint(task, event, draw.choice(ANY_HARM), draw.random() < 0.5) for task, event in chosen]
    harms = tuple(point if point.harm in KILLS else replace(point, effects_done=True) for point in points)
    return replace(scenario, harms=harms)


def test_the_last_numbers_do_not_depend_on_the_order_of_events() -> None:
    assert len({play(ReplicaScenario(seed=seed)).numbers for seed in range(8)}) == 1


@pytest.mark.parametrize("returns", [True, False])
def test_a_kill_at_any_event_is_not_noticed(returns: bool) -> None:
    tally = search_one(replace(SMALL, servers_return=returns), stride=11)
    assert not tally.broken, str(tally.broken[0][1])
    assert set(tally.endings) == {"completed"}
    assert tally.takeovers > 10


def test_broken_links_lose_nothing() -> None:
    tally = search_one(SMALL, harms=(Harm.BREAK,), stride=9)
    assert not tally.broken, str(tally.broken[0][1])
    assert set(tally.endings) == {"completed"}


@pytest.mark.parametrize("first", [server(0), server(1), worker(1)])
def test_two_kills_break_no_rule(first: TaskId) -> None:
    tally = search_two(SMALL, HarmPoint(first, 20), stride=7)
    assert not tally.broken, str(tally.broken[0][1])
    assert tally.endings["completed"] > 5


@pytest.mark.parametrize("seed", range(4))
def test_the_next_server_may_be_killed_once_the_job_says_that_it_has_a_replica(seed: int) -> None:
    scenario = ReplicaScenario(seed=seed, steps=6, harms=(HarmPoint(server(seed % 2), 30),))
    run = ReplicaWorld(scenario).run()
    assert run.ok
    survivor = server(1 - seed % 2)
    late = [number for task, number in run.moments if task == survivor][-12::4]
    for number in late:
        again = ReplicaWorld(replace(scenario, harms=(*scenario.harms, HarmPoint(survivor, number))))
        result = again.run()
        assert result.ok or not again.judge.must_complete
        if result.ok:
            assert result.numbers == run.numbers


def test_of_two_servers_that_are_cut_one_ends_and_the_other_goes_on_with_the_proof_of_that() -> None:
    for point in list(points_of(play(SMALL), (Harm.CUT,), Role.SERVER))[::11]:
        run = play(replace(SMALL, harms=(point,)))
        assert run.ok
        assert run.struck == 0 or run.causes <= {Cause.NO_PATH}


def test_without_proof_no_server_goes_on() -> None:
    without = replace(SMALL, proof_passes=False)
    for point in list(points_of(play(SMALL), (Harm.CUT,), Role.SERVER))[::11]:
        run = play(replace(without, harms=(point,)))
        assert run.ok or Cause.NO_PATH in run.causes


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_search_finds_the_defect(mutant: type, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, maker = random.Random(0), MutantMaker(mutant)
    runs = [harmed(draw) for _ in range(MOST_TRIES)]
    first = FOUND_AT.get(mutant, 0)
    runs = [*DIRECTED.get(mutant, ()), *runs[first:], *runs[:first]]
    for kind, (module, name) in MODULES.items():
        if issubclass(mutant, kind):
            monkeypatch.setattr(module, name, mutant)
    assert any(breaks_a_rule(scenario, maker) for scenario in runs)


def test_without_a_defect_the_same_runs_break_no_rule_and_walk_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: set[tuple[StrEnum, StrEnum]] = set()

    def watching(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger) -> State:
        walked.add((state, trigger))
        return advance(table, state, trigger)

    for module in (shard_home, coordination):
        monkeypatch.setattr(module, "advance", watching)
    draw = random.Random(0)
    for _ in range(40):
        play(harmed(draw))
    assert walked == {*shard_home.HOME_BUCKET_TRANSITIONS, *coordination.COORDINATION_TRANSITIONS}


def breaks_a_rule(scenario: ReplicaScenario, maker: ReplicaMaker) -> bool:
    try:
        play(scenario, maker)
    except Violation:
        return True
    return False
