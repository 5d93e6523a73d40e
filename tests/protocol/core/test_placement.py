"""Where shards live, before and after a loss."""

from __future__ import annotations

from lockstep.protocol.core.placement import NOBODY, Homes, Placement


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
