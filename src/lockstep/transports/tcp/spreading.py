"""Over one connection or over all: the kernel knows whether the network is what holds the first one up.

Where every flow gets a part of the network only, as in most clouds, or loses packets, several carry more than one.
Where a processor is the limit, several only cost more calls. So a link has several connections, and uses the others
while the first one always has something on its way, neither the memory of this end nor that of the other is what it
waits for, and it has not lately been as fast as a processor. All of this is in ``TCP_INFO``.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

WINDOW_SECONDS: Final = 0.1
"""So long there must have been something to send before it is decided anew; the kernel counts in jiffies."""
MOSTLY: Final = 0.9
SELDOM: Final = 0.1

FAST: Final = 1_500_000_000
"""Bytes a second. Where one connection carries so much, more of them cost more processor time than they save."""
RATES_KEPT: Final = 16
"""Single ones say little: the kernel measures from one acknowledgement to another, and a processor that is busy delays
those. The fastest of some is what the network can do."""

_INFO_BYTES: Final = 232
_LIMITS: Final = struct.Struct("<QQQQ")
_LIMITS_AT: Final = 160
"""Where ``tcpi_delivery_rate``, ``tcpi_busy_time``, ``tcpi_rwnd_limited`` and ``tcpi_sndbuf_limited`` are in ``struct
tcp_info``."""


class HeldUp(NamedTuple):
    """Microseconds since the connection began, and how fast it was just now."""

    busy: int
    """With something on its way."""
    by_receiver: int
    by_sender: int
    rate: int = 0
    """Bytes a second."""


def held_up(connection: socket.socket) -> HeldUp | None:
    """What the kernel has counted; None if it does not count."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        rate, busy, by_receiver, by_sender = _LIMITS.unpack_from(info, _LIMITS_AT)
        return HeldUp(busy, by_receiver, by_sender, rate)
    except (OSError, struct.error):
        return None


def network_limits(before: HeldUp, after: HeldUp, seconds: float) -> bool:
    """Whether the network was the limit in these seconds, in which there was always something to send."""
    busy = (after.busy - before.busy) / 1e6
    waited = (after.by_receiver - before.by_receiver + after.by_sender - before.by_sender) / 1e6
    return busy >= MOSTLY * seconds and waited <= SELDOM * busy


class Spreading:
    """Of one link and direction; used by the thread that pushes."""

    def __init__(self, look: Callable[[], HeldUp | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._on = False
        self._seconds = 0.0
        self._since: float | None = None
        self._before = look()
        self._rates: deque[int] = deque(maxlen=RATES_KEPT)

    def decide(self) -> bool:
        """A large chunk is about to be sent: whether it goes over all connections."""
        now = self._clock()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now
        if self._seconds >= WINDOW_SECONDS:
            after = self._look()
            if self._before is not None and after is not None:
                self._rates.append(after.rate)
                self._on = network_limits(self._before, after, self._seconds) and max(self._rates) < FAST
            self._before, self._seconds = after, 0.0
        return self._on

    def pause(self) -> None:
        """There is nothing more to send for now."""
        if self._since is not None:
            self._seconds += self._clock() - self._since
            self._since = None
