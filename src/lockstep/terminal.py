"""Lines for people, on stderr and on terminals."""

from __future__ import annotations

import sys

CLEAR_LINE = "\r\x1b[K"
"""Back to the first column, and empty the line."""


def clear_line(live: bool) -> str:
    """What must precede a line of text on a terminal that may show a live line."""
    return CLEAR_LINE if live else ""


def say(text: str) -> None:
    """Write one line to stderr in one piece, because a task and its monitor share it."""
    sys.stderr.write(f"lockstep: {text}\n")
    sys.stderr.flush()


def say_over(text: str) -> None:
    """As ``say``, in place of a live line or the ``^C`` that a terminal shows."""
    sys.stderr.write(f"{clear_line(sys.stderr.isatty())}lockstep: {text}\n")
    sys.stderr.flush()
