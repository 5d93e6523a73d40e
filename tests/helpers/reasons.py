"""Reasons for tests in which only their passing on matters."""

from __future__ import annotations

from lockstep.protocol.causes import Cause, Reason


def because(text: str, cause: Cause = Cause.FAILED) -> Reason:
    return Reason(cause, text)
