"""How often one host may ask for something costly: often at once, because a large cluster starts on one host, and
then so rarely that answering does not slow down the training."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

AT_ONCE: Final = 64
PER_SECOND: Final = 8.0
_MOST_CALLERS: Final = 1024


class CallerBudget:
    """The questions that each caller has left. May be used by several threads."""

    def __init__(
        self, at_once: int = AT_ONCE, per_second: float = PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Of each caller: how many, and when that was so. The one that has not asked for longest comes first."""

    def take(self, caller: str) -> bool:
        """Whether this caller may ask now."""
        now = self._clock()
        with self._lock:
            left, at = self._left.pop(caller, (float(self._at_once), now))
            left = min(self._at_once, left + (now - at) * self._per_second)
            allowed = left >= 1.0
            self._left[caller] = (left - 1.0 if allowed else left, now)
            if len(self._left) > _MOST_CALLERS:
                self._left.popitem(last=False)
        return allowed


def host_of(peer: str) -> str:
    """The host in gRPC's name of a caller, ``ipv4:10.0.0.1:40000``: a caller's ports change from call to call."""
    return peer.rpartition(":")[0]
