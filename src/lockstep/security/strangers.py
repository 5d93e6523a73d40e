"""Places for connections that have not proven anything yet.

There are a few. When all are taken, the connection that has waited longest is cut to make room: a member proves itself
within milliseconds, so it gets through however many silent connections there are, and those never hold more than these
few threads and descriptors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from lockstep.security.proof import ProofError, Refusal

PLACES: Final = 16


class Strangers:
    """The unproven connections of one listener."""

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._waiting: dict[object, Callable[[], object]] = {}  # in the order of their arrival

    @contextmanager
    def place(self, cut: Callable[[], object]) -> Iterator[None]:
        """Hold a place until the connection has proven itself or is refused. ``cut`` must end what it waits for.
        ``ProofError`` at the end of the ``with`` block if it was cut, even if it came that far."""
        own = object()
        with self._lock:
            oldest = next(iter(self._waiting)) if len(self._waiting) >= self._places else None
            evict = None if oldest is None else self._waiting.pop(oldest)
            self._waiting[own] = cut
        if evict is not None:
            evict()
        kept = None
        try:
            yield
        finally:
            with self._lock:
                kept = self._waiting.pop(own, None)
        if kept is None:
            raise ProofError(Refusal.CROWDED)

    def cut_all(self) -> None:
        """The listener ends."""
        with self._lock:
            waiting = list(self._waiting.values())
        for cut in waiting:
            cut()
