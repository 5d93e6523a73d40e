"""What one task has moved, by path: counted over all connections of all its links, and printed at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterable
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
        self._shown: dict[str, tuple[int, int]] = {}

    def add(self, path: str, counters: Counters, tensors: int) -> None:
        """A link has ended, and this went over it."""
        with self._lock:
            total = self._totals.setdefault(path, _Total())
            total.sent += counters.bytes_sent
            total.received += counters.bytes_received
            total.writes += counters.writes_sent + counters.writes_received
            total.loans += counters.lends_sent + counters.lends_received
            total.tensors += tensors

    def moved(self, running: Iterable[tuple[str, Counters]]) -> dict[str, tuple[int, int]]:
        """Bytes sent and received by path, over links that have ended and those that are ``running``.

        A link that ends right now may be in neither or in both: what was shown before never becomes less.
        """
        with self._lock:
            sums = {path: (total.sent, total.received) for path, total in self._totals.items()}
            for path, counters in running:
                sent, received = sums.get(path, (0, 0))
                sums[path] = (sent + counters.bytes_sent, received + counters.bytes_received)
            for path, (sent, received) in sums.items():
                before = self._shown.get(path, (0, 0))
                self._shown[path] = (max(sent, before[0]), max(received, before[1]))
            return dict(self._shown)

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
