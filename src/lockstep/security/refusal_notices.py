"""Says who was refused, at most once in a while: strangers must not be able to fill a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from lockstep.security.proof import ProofError, Refusal

EVERY_SECONDS: Final = 10.0


class RefusalNotices:
    """Called with the address of each connection that was refused. Those that only hung up are not worth a line."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._next = -EVERY_SECONDS
        self._unsaid = 0

    def __call__(self, address: str, error: ProofError) -> None:
        if error.refusal is Refusal.CLOSED:
            return
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._unsaid += 1
                return
            self._next = now + EVERY_SECONDS
            before, self._unsaid = self._unsaid, 0
        others = f" ({before} more before)" if before else ""
        self._say(f"refused a connection from {address}{others}: {error}")
