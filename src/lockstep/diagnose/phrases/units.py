"""How the sentences write numbers."""

from __future__ import annotations


def in_seconds(seconds: float) -> str:
    """``4.2 s``."""
    return f"{seconds:.1f} s"


def in_milliseconds(seconds: float) -> str:
    """``20 ms``."""
    return f"{seconds * 1000:.0f} ms"
