"""Notifies any number of waiting threads that something has changed."""

from __future__ import annotations

import threading


class Broadcast:
    """A counter of changes. Each waiter remembers the number it has seen, so that no change is missed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._closed = False

    @property
    def number(self) -> int:
        """How many changes there have been so far."""
        return self._number

    @property
    def closed(self) -> bool:
        return self._closed

    def notify(self) -> None:
        """Something has changed."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """Wait for a change after number ``seen``, at most ``seconds``; the number now."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number != seen, seconds)
            return self._number

    def close(self) -> None:
        """Let every waiter return at once, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
