"""Errors in data; each message is one sentence that names the file and says what to do."""

from __future__ import annotations


class BadData(ValueError):  # noqa: N818 - reads as the fact it states
    """The data set as a whole cannot be used; the text is one sentence with a remedy."""


class BadRecord(ValueError):  # noqa: N818 - reads as the fact it states
    """One record or image cannot be used; the text says why, without the name of its file."""


class TooManyBadRecords(BadData):
    """More records were skipped than ``--max_bad_records`` allows."""
