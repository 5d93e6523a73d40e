"""Which findings are said, and when: a finding counts once it was made twice, and is said once until the job moves."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import CANNOT_HEAL, NOTICED, seconds_allowed
from lockstep.protocol.core.timing import STALL_AFTER_SECONDS, USER_CODE_SECONDS

AT_ONCE: Final = frozenset({Cause.DEAD, Cause.FAILED})
"""The kernel says so; looking again changes nothing."""
_ALIKE: Final[Mapping[Cause, Cause]] = MappingProxyType({Cause.LOOPING: Cause.USER_CODE})
"""A program that computes now and waits then is still the same program."""


class Saying(StrEnum):
    """What to do with a finding."""

    NOTHING = "nothing"
    NOTICE = "notice"
    VERDICT = "verdict"


class Standstill:
    """From the moment a job stands still until it moves."""

    def __init__(self) -> None:
        self._last: object = None
        self._said: dict[object, Saying] = {}

    @property
    def spoken(self) -> bool:
        return bool(self._said)

    def found(self, diagnosis: Diagnosis | None, waited: float, *, final: bool = False) -> Saying:
        """``final``: there is no second look, because the job has ended."""
        verdict = None if diagnosis is None else diagnosis.verdict
        key = None if verdict is None else _key(verdict)
        again, self._last = key is not None and key == self._last, key
        if verdict is None or not (again or final or verdict.cause in AT_ONCE):
            return Saying.NOTHING
        said, new = self._said.get(key, Saying.NOTHING), _how(verdict, waited)
        if new is said or said is Saying.VERDICT:
            return Saying.NOTHING
        self._said[key] = new
        return new

    def over(self) -> None:
        self._last = None
        self._said.clear()


def _key(verdict: Verdict) -> tuple[Cause, str, str]:
    alike = _ALIKE.get(verdict.cause, verdict.cause)
    # One that is dead or frozen is the same fault, whichever call the others wait in by now.
    return alike, verdict.culprit, "" if alike in (Cause.DEAD, Cause.FAILED, Cause.FROZEN) else verdict.key


def _how(verdict: Verdict, waited: float) -> Saying:
    if verdict.cause is Cause.NEVER_STARTED:  # it may just be late
        return Saying.VERDICT if waited >= STALL_AFTER_SECONDS else Saying.NOTICE
    if verdict.cause in NOTICED:
        return Saying.VERDICT if waited >= seconds_allowed(verdict.cause, 0.0, USER_CODE_SECONDS) else Saying.NOTICE
    return Saying.VERDICT if verdict.proven else Saying.NOTICE


def may_end(verdict: Verdict, waited: float) -> bool:
    """Whether a job whose user asked for that ends now, by the table that our own jobs end by."""
    allowed = seconds_allowed(verdict.cause, STALL_AFTER_SECONDS, USER_CODE_SECONDS)
    return verdict.proven and (verdict.cause in CANNOT_HEAL or waited >= allowed)
