"""How long an end looks for a probe, and how much of that time it could not run at all."""

from __future__ import annotations

from typing import Final

LOOK_SECONDS: Final = 8.0
"""How long the first bytes may take. RDMA itself may retry forever, and reports nothing meanwhile."""

_PAUSES: Final = (0.001, 0.05)
"""Seconds between two looks: at first, and at most. Bytes arrive at once or, usually, much later: the peer is still
importing torch, and this task, which may be too, needs its processor for that."""
_LATE: Final = 0.5
"""If a look comes this much later than planned, this end was kept from running."""
PROOF_SECONDS: Final = 1.0
"""An end that was kept from running for longer than this, in total, has proven nothing."""


class ProbeTimer:
    """Counts the looks of one end. Times are those of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._last = now
        self.frozen = 0.0
        """Seconds in which this end did not run: native code, such as an import, may block all threads."""

    def over(self, now: float) -> bool:
        """Record a look; whether it was the last one."""
        self.frozen += max(0.0, now - self._last - _LATE)
        self._last = now
        return now - self._began > LOOK_SECONDS

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return min(max(_PAUSES[0], (self._last - self._began) / 20), _PAUSES[1])


def proves_that_there_is_no_path(frozen_here: float, frozen_there: float) -> bool:
    """Whether a probe that neither end received says anything about the network between them."""
    return frozen_here + frozen_there < PROOF_SECONDS
