"""The small objects of second homes, one at a time; ``tests/sim/test_sim_replicas.py`` has them together."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.ids import INITIAL_STEP, Step, server, worker
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.placement import NOBODY, Homes, Placement
from lockstep.protocol.replication.decisions import HeldDecisions
from lockstep.protocol.replication.replica_events import CopyMade, MakeCopy, ReplicaEffect, Say, TakeCopy, VersionMade
from lockstep.protocol.replication.replica_messages import (
    CopyOf,
    Decided,
    DecisionRecord,
    Entering,
    Stamped,
    UpdateFacts,
    UpdateOf,
)
from lockstep.protocol.replication.shard_copy import ShardCopy
from lockstep.protocol.replication.shard_home import (
    HOME_BUCKET_TRANSITIONS,
    NOT_HELD,
    FactsOfSteps,
    HomeBucketState,
    HomeBucketTrigger,
    ShardHome,
)
from lockstep.protocol.replication.speech import Speech

PS0, PS1, W0 = server(0), server(1), worker(0)
LIVES = {PS0: 1, PS1: 2, W0: 3}
SPEECH = Speech(PS0, 1, LIVES, LIVES)
FOLLOWS: list[ReplicaEffect] = [Say(W0, Entering())]


def record(committed: Step = INITIAL_STEP) -> DecisionRecord:
    return DecisionRecord(0, 1, Placement.at_start(2), tuple(LIVES.items()), committed, ())


def made(home: ShardHome, step: Step) -> list[ReplicaEffect]:
    """One step of bucket 0, of one worker, from its gradient to what the home says of it."""
    home.committed = step - 1
    home.take(W0, step, 0, 70 + step)
    (make,) = home.make_what_is_complete()
    update = make.update  # type: ignore[union-attr]
    return home.on_made(VersionMade(0, step, 80 + step, ""), update, SPEECH)


def home_of_one_bucket(*steps: Step) -> ShardHome:
    facts = FactsOfSteps((W0,))
    for step in steps:
        facts.note(W0, UpdateFacts(step, clip=0.5))
    home = ShardHome(0, {0: INITIAL_STEP}, facts, whole=True, digest_every=50)
    home.place(Homes(0, 1, whole=True), SPEECH)
    return home


# -- placement --


def test_the_second_home_of_a_lost_server_takes_its_place() -> None:
    after = Placement.at_start(2).after({1})
    assert after == Placement((Homes(1), Homes(1)), Homes(1))


def test_a_server_that_is_left_becomes_the_next_second_home_and_is_not_whole() -> None:
    after = Placement.at_start(3).after({1, 2})
    assert after is not None
    assert after.shards == (Homes(1, 2), Homes(1, 2, whole=True), Homes(2, 1))
    assert after.coordination == Homes(1, 2)
    assert not after.whole


def test_what_has_no_whole_second_home_is_lost_with_its_home() -> None:
    alone = Placement.at_start(2).after({1})
    assert alone is not None
    assert alone.after({0}) is None
    filled = alone.after({0, 1})
    assert filled is not None
    assert filled.after({0}) is None
    whole = filled.with_whole_shard(0).with_whole_shard(1).with_whole_deputy()
    assert whole.whole
    assert whole.after({0}) is not None


def test_the_last_server_has_no_second_home() -> None:
    assert Homes(0, 1, whole=True).after({0}) == Homes(0, NOBODY)


# -- a home --


def test_a_version_is_known_once_the_second_home_holds_it() -> None:
    home = home_of_one_bucket(INITIAL_STEP, 0)
    (handed_on,) = made(home, INITIAL_STEP)
    assert handed_on == Say(PS1, Stamped(1, UpdateOf(INITIAL_STEP, 0, 79, clip=0.5)))
    assert not home.readable(0, 0)
    home.on_held(0, 0, SPEECH)
    assert home.readable(0, 0)
    made(home, 0)
    assert home.readable(0, 0)
    assert not home.readable(0, 1)
    assert not home.readable(0, INITIAL_STEP)


def test_what_was_handed_on_is_handed_on_again_in_the_next_view() -> None:
    home = home_of_one_bucket(INITIAL_STEP)
    first = made(home, INITIAL_STEP)
    assert home.place(Homes(0, 1, whole=True), SPEECH) == first


def test_without_a_second_home_nothing_waits() -> None:
    home = home_of_one_bucket(INITIAL_STEP)
    made(home, INITIAL_STEP)
    home.place(Homes(0), SPEECH)
    assert home.readable(0, 0)
    assert not home.may_be_called_whole


def test_a_new_second_home_is_filled_and_called_whole_after_the_commit() -> None:
    home = home_of_one_bucket(INITIAL_STEP)
    made(home, INITIAL_STEP)
    home.place(Homes(0), SPEECH)
    home.committed = INITIAL_STEP - 1
    (copy,) = home.place(Homes(0, 1), SPEECH)
    assert (copy.peer, copy.bucket, copy.version) == (PS1, 0, 0)  # type: ignore[union-attr]
    home.on_held(0, 0, SPEECH)
    assert home.waits_for_second
    home._copied = 1
    assert not home.may_be_called_whole
    home.committed = 0
    assert home.may_be_called_whole


def test_a_pair_that_is_not_in_the_table_is_a_defect() -> None:
    with pytest.raises(LocalProtocolError, match="no transition from 'collecting' on 'the second home holds it'"):
        advance(HOME_BUCKET_TRANSITIONS, HomeBucketState.COLLECTING, HomeBucketTrigger.HELD)


# -- a second home --


def test_updates_are_held_at_once_and_made_in_order() -> None:
    copy = ShardCopy(0, [0], from_start=True)
    first, second = UpdateOf(INITIAL_STEP, 0, 5), UpdateOf(0, 0, 6, digest="aa")
    assert copy.on_update(first) == [MakeCopy(first)]
    assert copy.on_update(second) == []
    assert copy.held(0) == 1
    assert copy.on_made(CopyMade(0, INITIAL_STEP, "")) == ([MakeCopy(second)], True)
    assert copy.on_made(CopyMade(0, 0, "bb")) == ([], False)
    copy.check()


def test_an_update_after_a_gap_or_again_is_not_taken() -> None:
    copy = ShardCopy(0, [0], from_start=False)
    assert copy.on_update(UpdateOf(3, 0, 5)) == []
    assert copy.held(0) == NOT_HELD
    taken = CopyOf(0, 3, 9, 1)
    assert copy.on_copy(taken) == [TakeCopy(taken)]
    assert copy.on_copy(taken) == []
    assert copy.on_update(UpdateOf(2, 0, 5)) == []
    assert copy.held(0) == 3


def test_a_copy_that_comes_while_the_store_works_is_taken_afterwards() -> None:
    copy = ShardCopy(0, [0], from_start=True)
    copy.on_update(UpdateOf(INITIAL_STEP, 0, 5))
    newer = CopyOf(0, 4, 9, 1)
    assert copy.on_copy(newer) == []
    assert copy.on_made(CopyMade(0, INITIAL_STEP, "")) == ([TakeCopy(newer)], True)
    assert copy.held(0) == 4


# -- decisions --


def test_what_follows_from_a_decision_waits_for_the_deputy() -> None:
    decisions = HeldDecisions()
    decisions.choose(PS1, 2, whole=True)
    (told,) = decisions.decide(record(), list(FOLLOWS))
    assert isinstance(told, Say)
    assert isinstance(told.message, Decided)
    assert decisions.after_newest(list(FOLLOWS)) == []
    assert decisions.on_held(PS0, 1) == ([], False), "not its deputy"
    assert decisions.on_held(PS1, 1) == (FOLLOWS * 2, False)


def test_a_new_deputy_is_whole_with_the_newest_decision_only() -> None:
    decisions = HeldDecisions()
    decisions.choose(PS1, 2, whole=False)
    assert FOLLOWS[0] in decisions.decide(record(), list(FOLLOWS))
    decisions.decide(record(0), [])
    assert decisions.on_held(PS1, 1) == ([], False)
    assert decisions.on_held(PS1, 2) == ([], True)
    assert decisions.waits_for_deputy


def test_another_incarnation_of_the_deputy_frees_what_waited_for_the_former() -> None:
    decisions = HeldDecisions()
    decisions.choose(PS1, 2, whole=True)
    decisions.decide(record(), list(FOLLOWS))
    assert decisions.choose(PS1, 9, whole=False) == FOLLOWS
    assert not decisions.waits_for_deputy
