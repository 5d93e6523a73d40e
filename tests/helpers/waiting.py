"""Waiting for conditions, never for durations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], seconds: float, what: str) -> Value:
    """Evaluate ``condition`` repeatedly until it is true; return its value, or fail with ``what``."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        pause.wait(0.01)
