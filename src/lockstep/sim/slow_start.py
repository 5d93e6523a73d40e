"""Why a network with a long delay is slow at first, and after every pause: TCP sends little, and twice as much with
every round trip.

A connection halves what it has on its way for every retransmission timeout that it has been idle (the kernel's default,
``net.ipv4.tcp_slow_start_after_idle=1``, unless its congestion control remembers its speed, as BBR does). Gradients and
parameters take turns, so connections are idle in every step. The loss of packets is not modelled.
"""

from __future__ import annotations

from typing import Final

FIRST_BYTES: Final = 10 * 1448
"""What a connection sends before the first answer."""
TIMEOUT_SECONDS: Final = 0.2
"""The kernel's least retransmission timeout; a round trip is added to it."""


class SendWindow:
    """One direction of a link."""

    def __init__(self, bandwidth: float, round_trip: float) -> None:
        """``bandwidth``: bytes per second of the slowest part of the way. ``round_trip``: seconds."""
        self._bandwidth = bandwidth
        self._round_trip = round_trip
        self._full = bandwidth * round_trip
        self._bytes = float(FIRST_BYTES)
        self._free_at = 0.0

    def send(self, begins: float, nbytes: int) -> tuple[float, float]:
        """When the first and the last of these bytes leave, where the adapter would let the first leave now."""
        begins = max(begins, self._free_at)
        timeouts = int((begins - self._free_at) / (TIMEOUT_SECONDS + self._round_trip))
        self._bytes = max(FIRST_BYTES, self._bytes / 2 ** min(timeouts, 64))
        ends = begins + self._held_up(nbytes) + nbytes / self._bandwidth
        self._free_at = ends
        return begins, ends

    def _held_up(self, nbytes: int) -> float:
        """How long answers are awaited although there is more to send; the window grows meanwhile."""
        waited, left = 0.0, float(nbytes)
        while left > self._bytes and self._bytes < self._full:
            waited += self._round_trip - self._bytes / self._bandwidth
            left -= self._bytes
            self._bytes *= 2
        return waited
