"""Places for connections that have not proven anything yet.

There are a few. When all are taken, one connection is cut to make room: the one that has waited longest among those
that have said nothing yet, and only then among those that are in the middle of their proof. A member sends its first
message as it connects and proves itself within milliseconds, so it gets through however many silent connections there
are, at the latest when it dials again; and those never hold more than these few threads and descriptors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from lockstep.security.proof import ProofError, Refusal

PLACES: Final = 16


class StrangerPlace:
    """One of the places. ``spoke``: it has sent a first message that makes sense."""

    def __init__(self, cut: Callable[[], object]) -> None:
        self.cut = cut
        self.has_spoken = False

    def spoke(self) -> None:
        self.has_spoken = True


class Strangers:
    """The unproven connections of one listener."""

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._waiting: list[StrangerPlace] = []  # in the order of their arrival

    @contextmanager
    def place(self, cut: Callable[[], object]) -> Iterator[StrangerPlace]:
        """Hold a place until the connection has proven itself or is refused. ``cut`` must end what it waits for.
        ``ProofError`` at the end of the ``with`` block if it was cut, however far it came."""
        own = StrangerPlace(cut)
        with self._lock:
            evicted = self._make_room()
            self._waiting.append(own)
        if evicted is not None:
            evicted.cut()
        kept = False
        try:
            yield own
            kept = self._leave(own)
        except Exception as error:
            if self._leave(own):
                raise
            raise ProofError(Refusal.CROWDED) from error
        finally:
            self._leave(own)
        if not kept:
            raise ProofError(Refusal.CROWDED)

    def _leave(self, own: StrangerPlace) -> bool:
        """Whether it still had its place."""
        with self._lock:
            kept = own in self._waiting
            if kept:
                self._waiting.remove(own)
        return kept

    def _make_room(self) -> StrangerPlace | None:
        if len(self._waiting) < self._places:
            return None
        evicted = min(self._waiting, key=lambda one: one.has_spoken)  # the first of equals
        self._waiting.remove(evicted)
        return evicted

    def cut_all(self) -> None:
        """The listener ends."""
        with self._lock:
            waiting = list(self._waiting)
        for one in waiting:
            one.cut()
