"""A second home says that it holds a version when it has all that it is made of, and makes it afterwards."""

from __future__ import annotations

from dataclasses import replace

from lockstep.protocol.core.effects import Apply, Effect, GiveBack, Send, TakeBucket
from lockstep.protocol.core.events import BucketApplied, BucketTaken, MeanArrived
from lockstep.protocol.core.ids import server
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import BucketCopy, GroupRates, HandOn, Holding, ParameterEntry
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.core.plan import make_plan
from lockstep.protocol.server.second_homes import Places, SecondBucket
from lockstep.protocol.server.second_shard import DIGEST_EVERY, SecondShard

HOME = server(0)
RATES = (GroupRates(("lr",), (0.1,)),)


def _shard(version: int = 3) -> SecondShard:
    plan = make_plan((ParameterEntry("p", 16, "float32", 0),), 2, 64)
    assert plan.buckets[0].server == HOME.index
    shard = SecondShard(Places(Placement.at_start(2), 1, {}, plan), Journal(), lambda _: True)
    shard.buckets[0] = SecondBucket(version)
    return shard


def _mean(step: int, arrival: int, *, with_facts: bool = True) -> MeanArrived:
    return MeanArrived(HOME, 7, step, 0, arrival, HandOn(step, 0, mean=True, rates=RATES) if with_facts else None)


def _applied(effects: list[Effect]) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.step, one.arrivals) for one in effects if isinstance(one, Apply)]


def _held(effects: list[Effect]) -> list[Holding]:
    return [one.message for one in effects if isinstance(one, Send) and isinstance(one.message, Holding)]


def test_what_is_held_is_said_before_it_is_made() -> None:
    shard = _shard()
    effects = shard.on_mean(_mean(3, 41), 0.0)
    assert _held(effects) == [Holding(0, 4, reads=True)]
    assert _applied(effects) == [(3, (41,))]
    assert shard.on_made(BucketApplied(0, 3), 0.1) == []
    assert shard.buckets[0].version == 4


def test_a_mean_without_the_rest_is_not_held() -> None:
    shard = _shard()
    assert shard.on_mean(_mean(3, 41, with_facts=False), 0.0) == []
    assert _held(shard.on_handed_on(HOME, HandOn(3, 0, mean=True, rates=RATES), 0.1)) == [Holding(0, 4, reads=True)]


def test_versions_are_made_one_after_another() -> None:
    """A step without gradients needs no mean, so the next one may be here before it is made."""
    shard = _shard()
    assert _applied(shard.on_handed_on(HOME, HandOn(3, 0, mean=False), 0.0)) == [(3, ())]
    effects = shard.on_mean(_mean(4, 42), 0.1)
    assert (_held(effects), _applied(effects)) == ([Holding(0, 5, reads=True)], [])
    assert _applied(shard.on_made(BucketApplied(0, 3), 0.2)) == [(4, (42,))]


def test_where_both_homes_compare_it_is_said_once_it_is_made() -> None:
    step = DIGEST_EVERY - 1
    shard = _shard(step)
    assert _held(shard.on_mean(_mean(step, 41), 0.0)) == [Holding(0, step, reads=True)]
    assert _held(shard.on_made(BucketApplied(0, step, "digest"), 0.1)) == [Holding(0, step + 1, "digest")]


def test_what_is_handed_on_again_goes_back_and_is_confirmed_again() -> None:
    shard = _shard()
    shard.on_mean(_mean(3, 41), 0.0)
    again = shard.on_mean(_mean(3, 42), 0.1)
    assert again == [GiveBack(42), Send(HOME, Holding(0, 4, reads=True))]


def test_after_a_lost_link_its_home_hears_when_nothing_is_read_any_more() -> None:
    shard = _shard()
    shard.on_mean(_mean(3, 41), 0.0)
    assert _held(shard.on_home_up(HOME)) == [Holding(0, 4, reads=True)]
    assert _held(shard.on_made(BucketApplied(0, 3), 0.1)) == [Holding(0, 4)]


def test_a_copy_waits_until_what_is_held_is_made() -> None:
    """The home goes on as soon as a version is held, and may copy it then, with a state that a program has loaded."""
    shard = _shard()
    shard.on_mean(_mean(3, 41), 0.0)
    first = BucketCopy(0, 4, 0, 4, b"ab", edition=1)
    assert shard.on_copy(HOME, first) == []
    assert shard.on_copy(HOME, replace(first, offset=2, data=b"cd")) == []
    assert shard.on_made(BucketApplied(0, 3), 0.1) == [TakeBucket(0, 4, b"abcd")]
    assert _held(shard.on_taken(BucketTaken(0, 4), 0.2)) == [Holding(0, 4, edition=1)]
