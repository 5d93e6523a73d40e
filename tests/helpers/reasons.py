"""Reasons for tests in which it only matters that they are passed on."""

from __future__ import annotations

from lockstep.protocol.core.causes import Cause, Reason


def because(text: str, cause: Cause = Cause.FAILED) -> Reason:
    return Reason(cause, text)
