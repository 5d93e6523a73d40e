"""What terminals are told beside text."""

from __future__ import annotations

CLEAR_LINE = "\r\x1b[K"
"""Back to the first column, and empty the line."""


def clear_line(live: bool) -> str:
    """What goes before a line of text on a terminal, where a live line may stand."""
    return CLEAR_LINE if live else ""
