"""The error for a program that uses the library wrongly."""

from __future__ import annotations


class UsageError(Exception):
    """The program asks for something that would train wrongly; the message says what, and what to do instead."""
