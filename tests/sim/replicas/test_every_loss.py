"""Second homes as they run: kills, cuts and checkpoints at events of a run (``docs/replication.md``).

A tenth of what ``test_every_event`` looks at, which takes minutes and belongs to ``make test-long``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain, islice

import pytest

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.ids import server
from lockstep.sim.replicas.judged_world import Cut, JudgedWorld
from lockstep.sim.replicas.search import SavingWorld

from .library_world import LibraryWorld
from .replica_mutants import MUTANTS, ReplicaMutant
from .searches import (
    AgainWorld,
    Calm,
    ComparingWorld,
    LibraryAgainWorld,
    again_and_again,
    calm_run,
    cut_servers,
    drifts,
    judged,
    kills_while_forming,
    late_kills,
    one_kill,
    search,
    two_kills,
)


@pytest.mark.parametrize(
    ("kind", "stride"), [(JudgedWorld, 17), (SavingWorld, 17), (ComparingWorld, 41), (LibraryWorld, 23)]
)
def test_any_task_is_killed_at_any_event(kind: type[JudgedWorld], stride: int) -> None:
    calm = calm_run(kind)
    for world in one_kill(calm, kind, 3, stride):
        assert judged(world, calm)


def test_a_worker_that_comes_back_during_the_last_checkpoint_gets_the_last_version() -> None:
    """Its former incarnation had finished. The end waits until this one has."""
    for world, calm in late_kills(range(5, 9)):
        assert judged(world, calm)


def test_the_decision_of_every_step_may_overtake_what_was_said_before() -> None:
    world = JudgedWorld(steps=6)
    world.run()
    assert world.judging.overtook >= 6


def test_a_commit_that_only_a_view_tells_of_frees_what_waited_for_it() -> None:
    """Its home had all gradients of a bucket, and waited for a commit that was lost with the coordinator."""
    calm = calm_run()
    for moment in [moment for moment in calm.moments if moment[0] == server(0)][24:36]:
        world = JudgedWorld()
        world.kills[moment], world.keeps_last_words = True, False
        assert judged(world, calm)


def test_a_worker_and_a_server_are_killed_at_the_same_time() -> None:
    calm = calm_run()
    ended = [world for world in two_kills(calm, random.Random(1), 24) if not judged(world, calm, may_end=True)]
    # Only the loss of both servers ends the job, and everybody knows why.
    assert all(set(world.killed) == {server(0), server(1)} for world in ended)


def test_a_job_that_has_lost_both_homes_goes_back_to_its_checkpoint() -> None:
    """Where it has none it must not: ``judged`` looks at that in every run."""
    calm = calm_run(SavingWorld)
    worlds = list(two_kills(calm, random.Random(1), 24, SavingWorld))
    ended = [world for world in worlds if not judged(world, calm, may_end=True)]
    assert ended
    assert all(task.ended.again for world in ended for task in world.tasks.values() if task.alive and task.ended)


def test_a_second_home_that_drifts_ends_the_job_whatever_it_drifts_in() -> None:
    calm = calm_run()
    for world in drifts():
        assert not judged(world, calm)


def test_servers_that_are_lost_while_the_cluster_forms_are_waited_for() -> None:
    """With seed 3 a worker hears late of the end of a server's former incarnation, whose next one leads the job."""
    for world, calm in islice(kills_while_forming(range(3, 4)), 0, None, 7):
        assert judged(world, calm)


def test_a_cut_that_heals_is_not_noticed() -> None:
    calm = calm_run()
    for world in cut_servers(calm, 2, 13):
        assert judged(world, calm)


@pytest.mark.parametrize("number", [20, 60, 90])
def test_two_servers_that_are_cut_from_each_other_never_both_go_on(number: int) -> None:
    """Nobody has proof: neither takes over, and nothing more is committed than what both had decided."""
    calm = calm_run()
    moment = [moment for moment in calm.moments if moment[0] == server(number // 20 % 2)][number // 2]
    world = JudgedWorld()
    world.cut = Cut(*moment, (server(1 - moment[0].index),), heals=False)
    with pytest.raises(AssertionError, match="the run does not end"):
        world.run(1_500)
    assert world.views_since_cut == 0
    assert world.steps_since_cut <= 1


def test_a_server_that_was_taken_for_dead_ends_when_it_hears_of_it() -> None:
    calm = calm_run()
    moment = [moment for moment in calm.moments if moment[0] == server(0)][20]
    world = JudgedWorld()
    world.cut = Cut(*moment, tuple(task for task in world.tasks if task != server(0)), believed_dead=True)
    assert judged(world, calm)
    ended = world.tasks[server(0)].ended
    assert ended is not None
    assert (ended.alone, ended.reason.cause) == (True, Cause.STALE_INCARNATION)


def test_a_copy_that_is_ahead_of_its_view_waits_for_it() -> None:
    """With three servers its home may know of the view first. It copies a bucket once, and nobody asks it to again."""
    ((world, calm),) = again_and_again(range(62, 63), 3)
    assert judged(world, calm)


def test_what_was_handed_on_is_said_again_although_another_bucket_is_held() -> None:
    """The other one was held before this one was made; with that, nothing was due to be said again any more."""
    ((world, calm),) = again_and_again(range(31, 32), 3, LibraryAgainWorld)
    assert judged(world, calm)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: ReplicaMutant, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = search(mutant.part)
    run = next(runs)  # what is right was played before this
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.defect)
    with pytest.raises((AssertionError, KeyError, LocalProtocolError)):
        _judge_all([run], runs)


def _judge_all(*runs: Iterable[tuple[JudgedWorld, Calm, bool]]) -> None:
    for world, calm, may_end in chain(*runs):
        judged(world, calm, may_end=may_end)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_event() -> None:
    played = 0
    for kind in (JudgedWorld, SavingWorld, ComparingWorld, LibraryWorld):
        calm = calm_run(kind)
        for world in one_kill(calm, kind, 0, 1):
            played += judged(world, calm)
    for world, calm in kills_while_forming(range(4)):
        played += judged(world, calm)
    calm = calm_run()
    for world in cut_servers(calm, 0, 1):
        played += judged(world, calm)
    for kind in (JudgedWorld, SavingWorld, LibraryWorld):
        calm = calm_run(kind)
        for world in two_kills(calm, random.Random(0), 1000, kind):
            judged(world, calm, may_end=True)
            played += 1
    for servers in (2, 3):
        for family in (AgainWorld, LibraryAgainWorld):
            for again, calm in again_and_again(range(100), servers, family):
                played += judged(again, calm)
    assert played > 5000
