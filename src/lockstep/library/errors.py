"""The error for a program that uses the library wrongly."""

from __future__ import annotations

from lockstep.errors import LockstepError


class UsageError(LockstepError):
    """The program requests something that would train wrongly; the message names it, and what to do instead."""
