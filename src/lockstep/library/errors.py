"""The error for a program that uses the library wrongly."""

from __future__ import annotations


class UsageError(Exception):
    """The program requests something that would train wrongly; the message names it, and what to do instead."""
