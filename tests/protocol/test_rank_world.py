"""Ranks without servers that come back: a kill at events of a run, and two (``docs/recovery.md``)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from lockstep.protocol.core.errors import LocalProtocolError, RemoteProtocolError
from lockstep.protocol.core.ids import TaskId

from .rank_mutants import MUTANTS, RankMutant
from .rank_world import RankWorld

Moment = tuple[TaskId, int]


def calm(ranks: int, seed: int = 0) -> RankWorld:
    world = RankWorld(seed, ranks)
    world.run()
    assert all(task.ended is not None and task.ended.ok for task in world.tasks.values())
    return world


def judged(world: RankWorld, expected: RankWorld) -> bool:
    """Whether it ended well, as it must unless all that knew of the job were lost; with the undisturbed numbers."""
    world.run()
    ends = [task.ended for task in world.tasks.values() if task.ended is not None]
    well = bool(ends) and all(end.ok for end in ends)
    assert well or world.may_end, world.story()
    for found, number in zip(world.numbers(), expected.numbers(), strict=True):
        # One that was killed after the end of the job had done its part.
        assert found in (number, (0, 0, 0)) or world.may_end, world.story()
    return well


def one_kill(expected: RankWorld, first: int = 0, every: int = 1) -> Iterator[RankWorld]:
    for moment in expected.history[first::every]:
        for leaves in (True, False):
            for words in (True, False):
                world = RankWorld(expected.seed, expected.shape.workers)
                world.kills[moment] = leaves
                world.keeps_last_words = words
                yield world


def every_pair(expected: RankWorld, first: int = 0, every: int = 1) -> Iterator[RankWorld]:
    """Two kills at every two events of the run that nobody disturbs, each pair once, in one of eight ways."""
    dice = random.Random(0)
    ways = [(pair, dice.randrange(8)) for pair in combinations(expected.history, 2)]
    for (one, other), way in ways[first::every]:
        world = RankWorld(expected.seed, expected.shape.workers)
        world.kills = {one: bool(way & 1), other: bool(way & 2)}
        world.keeps_last_words = bool(way & 4)
        yield world


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_rank_is_killed_at_any_event(ranks: int) -> None:
    expected = calm(ranks)
    replayed = 0
    for world in one_kill(expected, 1, 5):
        judged(world, expected)
        assert world.killed
        replayed += world.replayed
    assert replayed


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_ranks_are_killed(ranks: int) -> None:
    expected, rng = calm(ranks), random.Random(ranks)
    well = 0
    for number in range(120):
        world = RankWorld(0, ranks)
        for moment in rng.sample(expected.history, 2):
            world.kills[moment] = rng.random() < 0.5
        world.keeps_last_words = bool(number % 2)
        well += judged(world, expected)
    assert well > 60


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: RankMutant, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {ranks: calm(ranks) for ranks in (2, 3)}
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.defect)
    with pytest.raises((AssertionError, KeyError, LocalProtocolError, RemoteProtocolError)):
        _judge_all(expected)


def _judge_all(expected: dict[int, RankWorld]) -> None:
    for every in (37, 7, 2):
        for known in expected.values():
            for world in one_kill(known, 1, every):
                judged(world, known)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_event_and_many_pairs(ranks: int) -> None:
    for seed in range(2):
        expected = calm(ranks, seed)
        for world in one_kill(expected):
            judged(world, expected)
        rng = random.Random(seed)
        for number in range(1500):
            world = RankWorld(seed, ranks)
            for moment in rng.sample(expected.history, 2):
                world.kills[moment] = rng.random() < 0.5
            world.keeps_last_words = bool(number % 2)
            judged(world, expected)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_pair_of_kills_of_two_ranks() -> None:
    expected = calm(2)
    for world in every_pair(expected):
        judged(world, expected)
