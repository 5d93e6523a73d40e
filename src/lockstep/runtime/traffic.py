"""What one task has moved, by path: counted over all connections of all its links, and printed at the end."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lockstep.transports.base import Counters


@dataclass(slots=True)
class _Total:
    sent: int = 0
    received: int = 0
    writes: int = 0
    loans: int = 0
    tensors: int = 0


class Traffic:
    """The totals of one task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, _Total] = {}

    def add(self, path: str, counters: Counters, tensors: int) -> None:
        """A link has ended, and this went over it."""
        with self._lock:
            total = self._totals.setdefault(path, _Total())
            total.sent += counters.bytes_sent
            total.received += counters.bytes_received
            total.writes += counters.writes_sent + counters.writes_received
            total.loans += counters.lends_sent + counters.lends_received
            total.tensors += tensors

    def lines(self) -> list[str]:
        """One sentence per path."""
        with self._lock:
            return [
                f"over {path}: sent {in_words(t.sent)}, received {in_words(t.received)}, {t.tensors} tensors in "
                f"{t.writes} writes and {t.loans} loans"
                for path, t in self._totals.items()
                if t.writes or t.loans
            ]


def in_words(nbytes: int) -> str:
    """A number of bytes in a suitable unit."""
    amount = float(nbytes)
    for unit in ("B", "KB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} GB"
