"""How long a job is stuck for which cause, and when it is said again."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.causes import Cause
from lockstep.runtime.watch.episode import Episode


def test_another_cause_is_named_at_once_and_the_same_one_ever_more_seldom() -> None:
    episode = Episode(0.0)
    looks = [(2.0, Cause.UNKNOWN), (3.0, Cause.USER_CODE), (4.0, Cause.UNKNOWN), (4.5, Cause.USER_CODE)]
    assert [episode.notice_is_due(*look) for look in looks] == [True, True, False, False]
    due = [now for now in range(5, 100) if episode.notice_is_due(float(now), Cause.USER_CODE)]
    assert due == [13, 33, 73]


def test_time_counts_from_the_last_progress() -> None:
    episode = Episode(0.0)
    for now in (3.0, 30.0, 60.0):
        assert episode.stuck_since(now, 1.0, Cause.UNKNOWN) == 1.0
    assert episode.stuck_since(61.0, 50.0, Cause.UNKNOWN) == 50.0


@pytest.mark.parametrize("longer", [Cause.USER_CODE, Cause.LOOPING, Cause.BUSY, Cause.COMPILING, Cause.STRAGGLER])
@pytest.mark.parametrize("other", [Cause.UNKNOWN, Cause.LINK_DOWN, Cause.FROZEN])
def test_a_long_evaluation_does_not_count_against_what_happens_meanwhile(longer: Cause, other: Cause) -> None:
    episode = Episode(0.0)
    for now in (3.0, 90.0):
        assert episode.stuck_since(now, 1.0, longer) == 1.0
    assert episode.stuck_since(91.0, 1.0, other) == 90.0
    assert episode.stuck_since(149.0, 1.0, other) == 90.0
    assert episode.stuck_since(150.0, 1.0, longer) == 1.0


def test_what_was_announced_does_not_count_against_user_code_that_waits_after_it() -> None:
    episode = Episode(0.0)
    episode.stuck_since(700.0, 1.0, Cause.BUSY)
    assert episode.stuck_since(701.0, 1.0, Cause.USER_CODE) == 700.0


PAIR = frozenset({"worker 1", "server 0"})


def test_a_verdict_that_differs_from_the_one_before_must_last_as_a_healing_link_looks_like_another_fault() -> None:
    episode = Episode(0.0)
    assert episode.verdict_holds(4.0, Cause.LINK_DOWN, PAIR)
    assert not episode.verdict_holds(5.0, Cause.ONE_WAY_LINK, PAIR)
    assert episode.verdict_holds(5.5, Cause.LINK_DOWN, PAIR)
    assert not episode.verdict_holds(8.0, Cause.ONE_WAY_LINK, PAIR)
    assert episode.verdict_holds(9.5, Cause.ONE_WAY_LINK, PAIR)


def test_a_death_after_another_verdict_is_named_at_once() -> None:
    episode = Episode(0.0)
    assert episode.verdict_holds(4.0, Cause.LINK_DOWN, PAIR)
    assert episode.verdict_holds(5.0, Cause.DEAD, PAIR)
