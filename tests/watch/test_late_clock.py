"""When a step is late, which findings are said, and who keeps the others waiting: on paper."""

from __future__ import annotations

from dataclasses import replace

from flight.jobs import PaperJob, steps
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.flight.recording import Recording
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.timing import FIRST_STEPS_NOTICE_SECONDS, NOTICE_SECONDS, USER_CODE_SECONDS
from lockstep.watch.late_clock import LATE_FACTOR, LateClock
from lockstep.watch.standstill import Saying, Standstill, may_end
from lockstep.watch.straggling import FIRST_LOOK_SECONDS, LONGEST_PAUSE_SECONDS, SteadyLooks, Straggler, straggler_in


def running(seconds: float, count: int = 30) -> tuple[LateClock, float]:
    """A job whose steps took so long so far, and the time now."""
    clock = LateClock(0.0)
    for step in range(1, count + 1):
        clock.note({0: (step, step * seconds), 1: (step, step * seconds)}, step * seconds)
    return clock, count * seconds


def test_a_step_is_late_after_the_usual_time_and_some_patience() -> None:
    clock, now = running(0.05)
    assert not clock.late(now + NOTICE_SECONDS - 0.1)
    assert clock.late(now + NOTICE_SECONDS + 0.1)
    clock, now = running(5.0)
    assert not clock.late(now + LATE_FACTOR * 5.0 - 0.1)
    assert clock.late(now + LATE_FACTOR * 5.0 + 0.1)


def test_before_the_first_steps_nothing_is_usual() -> None:
    clock = LateClock(0.0)
    assert not clock.late(FIRST_STEPS_NOTICE_SECONDS - 0.1)
    assert clock.late(FIRST_STEPS_NOTICE_SECONDS + 0.1)
    clock.alive(10.0)
    assert not clock.late(12.0)


def test_steps_that_become_slow_are_noticed_and_even_ones_are_not() -> None:
    clock, now = running(0.05)
    assert clock.slowdown() is None
    for step in range(31, 43):
        now += 0.4
        clock.note({0: (step, now), 1: (step, now)}, now)
    found = clock.slowdown()
    assert found is not None
    assert (round(found.recent, 2), round(found.usual, 2)) == (0.4, 0.05)


def test_of_long_steps_fewer_show_that_they_became_slow() -> None:
    clock, now = running(0.2)
    for step in range(31, 36):
        assert clock.slowdown() is None
        now += 0.7
        clock.note({0: (step, now), 1: (step, now)}, now)
    assert clock.slowdown() is not None


def late_by(lags: dict[int, float], count: int = 20) -> dict[int, Recording]:
    """Three ranks whose calls are half a second apart, some entered later by so much."""
    found = PaperJob({"0": (0, 1, 2)}, {rank: [*steps(count)] for rank in range(3)}).run().recordings()
    return {
        rank: replace(
            one,
            calls=tuple(
                replace(call, created=100.0 + 0.5 * call.number + lags.get(rank, 0.0) + 1e-4 * rank)
                for call in one.calls
            ),
        )
        for rank, one in found.items()
    }


def test_the_rank_that_all_others_wait_for_is_the_straggler() -> None:
    found = straggler_in(late_by({1: 0.3}), since=0.0)
    assert found is not None
    assert (found.rank, round(found.lag, 2)) == (1, 0.3)


def test_ranks_that_are_about_even_have_no_straggler() -> None:
    assert straggler_in(late_by({1: 0.02}), since=0.0) is None
    assert straggler_in({}, since=0.0) is None
    assert straggler_in(late_by({1: 0.3}, count=2), since=0.0) is None


def test_calls_that_are_made_together_are_waited_for_once() -> None:
    """Four buckets a step: they are late together, and the others wait a fifth of the time and not all of it."""
    found = late_by({})
    together = {
        rank: replace(
            one,
            calls=tuple(
                replace(call, created=100.0 + call.number // 4 + 1e-3 * (call.number % 4) + (0.2 if rank == 1 else 0.0))
                for call in one.calls
            ),
        )
        for rank, one in found.items()
    }
    assert straggler_in(together, since=0.0) is None


def test_a_rank_that_always_was_slow_is_named_when_two_looks_agree() -> None:
    looks, one = SteadyLooks(), Straggler(1, 0.3, 8, 0.9)
    assert not looks.due(100.0, 0.3)
    assert looks.due(100.0 + FIRST_LOOK_SECONDS, 0.3)
    assert not looks.due(100.0 + FIRST_LOOK_SECONDS, 10.0), "some steps must have ended"
    assert looks.found(one, 102.0) is None
    assert looks.found(replace(one, rank=2), 104.0) is None
    assert looks.found(replace(one, rank=2), 106.0) is not None
    assert looks.found(replace(one, lag=0.002), 108.0) is None
    assert looks.found(replace(one, lag=0.002), 110.0) is None


def test_looks_at_a_job_that_is_well_become_rare() -> None:
    looks, now, pauses = SteadyLooks(), 100.0, []
    for _ in range(8):
        looks.due(now, 0.01)
        began = now
        while not looks.due(now, 0.01):
            now += 1.0
        pauses.append(now - began)
        looks.found(None, now)
    assert pauses[0] == FIRST_LOOK_SECONDS
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def finding(cause: Cause, key: str = "all_reduce 5", culprit: str = "rank 1") -> Diagnosis:
    return Diagnosis(verdict=Verdict(cause=cause, culprit=culprit, key=key))


def test_a_finding_counts_when_it_was_made_twice_and_is_said_once() -> None:
    standstill = Standstill()
    said = [standstill.found(finding(Cause.FROZEN), waited) for waited in (2.0, 3.0, 4.0)]
    assert said == [Saying.NOTHING, Saying.VERDICT, Saying.NOTHING]
    standstill.over()
    assert [standstill.found(finding(Cause.FROZEN), 2.0) for _ in range(2)] == [Saying.NOTHING, Saying.VERDICT]


def test_a_death_is_said_at_once() -> None:
    assert Standstill().found(finding(Cause.DEAD), 0.0) is Saying.VERDICT


def test_calls_that_go_on_are_never_the_same_finding() -> None:
    standstill = Standstill()
    found = [standstill.found(finding(Cause.DEADLOCK, f"all_reduce {number}"), 3.0) for number in range(9)]
    assert set(found) == {Saying.NOTHING}


def test_user_code_gets_one_notice_and_a_verdict_only_after_its_time() -> None:
    standstill = Standstill()
    causes = [Cause.USER_CODE, Cause.LOOPING, Cause.USER_CODE, Cause.LOOPING]
    said = [standstill.found(finding(cause), 3.0) for cause in causes]
    assert said == [Saying.NOTHING, Saying.NOTICE, Saying.NOTHING, Saying.NOTHING]
    assert standstill.found(finding(Cause.LOOPING), USER_CODE_SECONDS + 1) is Saying.VERDICT


def test_a_job_ends_on_request_when_the_table_says_so() -> None:
    frozen, dead = finding(Cause.FROZEN).verdict, finding(Cause.DEAD).verdict
    assert frozen is not None
    assert dead is not None
    assert may_end(dead, 0.0)
    assert not may_end(frozen, 10.0)
    assert may_end(frozen, 61.0)
