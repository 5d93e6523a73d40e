"""The table of what ends a job, and when."""

from __future__ import annotations

import math

import pytest

from lockstep.protocol.core.causes import LOSSES, Cause
from lockstep.protocol.core.endings import CANNOT_HEAL, ENDS, NOTICED, WARNINGS, Ends, seconds_allowed


def test_every_cause_has_a_row() -> None:
    assert set(ENDS) == set(Cause)


@pytest.mark.parametrize(
    ("ends", "causes"),
    [
        (Ends.AT_ONCE, {Cause.DEAD, Cause.MISMATCH, Cause.DEADLOCK}),
        (Ends.AFTER_STALL, {Cause.FROZEN, Cause.LINK_DOWN, Cause.ONE_WAY_LINK, Cause.ANSWER_LOST, Cause.UNKNOWN}),
        (Ends.AFTER_USER_CODE, {Cause.USER_CODE, Cause.LOOPING}),
        (Ends.NEVER, {Cause.BUSY, Cause.COMPILING, Cause.STRAGGLER}),
    ],
)
def test_the_rows_are_those_of_the_docs(ends: Ends, causes: set[Cause]) -> None:
    assert {cause for cause in causes if ENDS[cause] is ends} == causes


def test_user_code_has_its_own_time_and_a_compiler_has_no_end() -> None:
    assert seconds_allowed(Cause.FROZEN, 60.0, 600.0) == 60.0
    assert seconds_allowed(Cause.USER_CODE, 60.0, 600.0) == 600.0
    assert math.isinf(seconds_allowed(Cause.COMPILING, 60.0, 600.0))


def test_a_loss_is_final_and_a_notice_is_not() -> None:
    assert LOSSES <= CANNOT_HEAL
    assert WARNINGS < NOTICED
    assert not NOTICED & CANNOT_HEAL
