"""How the sentences write numbers, places and the names of tasks."""

from __future__ import annotations

from lockstep.protocol.phrases import named as named


def in_seconds(seconds: float) -> str:
    """``4.2 s``; two clocks that differ by a hair do not make it negative."""
    return f"{max(0.0, seconds):.1f} s"


def in_milliseconds(seconds: float) -> str:
    """``20 ms``."""
    return f"{max(0.0, seconds) * 1000:.0f} ms"


def in_brackets(pid: int, host: str) -> str:
    """`` (pid 9 on node3)``, or nothing where the process is not known."""
    return f" (pid {pid} on {host})" if pid else ""
