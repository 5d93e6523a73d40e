"""What a program did wrong."""

from __future__ import annotations


class UsageError(Exception):
    """The program asks for something that would train wrongly; one sentence says what, and what to do instead."""
