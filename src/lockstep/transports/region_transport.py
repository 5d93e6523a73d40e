"""What the transports of one task have in common: registered memory, and a thread for every endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import PeerAddress, Region
from lockstep.transports.regions import OnClose, Regions

Talk = Callable[[], str]
"""Connects, moves bytes until the end, and returns the reason for the end."""


class _Served(Protocol):
    def run(self, talk: Talk) -> None: ...


class RegionTransport:
    """``connect`` and ``close`` are up to the transport that builds on it."""

    def __init__(self, name: str, on_close: OnClose = lambda _: None) -> None:
        """``on_close`` is called with the number of each region that is closed."""
        self._regions = Regions(name, on_close)

    def allocate(self, nbytes: int, purpose: str) -> Region:
        return self._regions.allocate(nbytes, purpose)

    def register(self, buffer: memoryview) -> Region:
        return self._regions.register(buffer)

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        return self._regions.grant(region, peer)

    @staticmethod
    def _serve(endpoint: _Served, talk: Talk, thread: str) -> None:
        """Let the endpoint have a thread of its own, of this name."""
        threading.Thread(target=endpoint.run, args=(talk,), name=thread, daemon=True).start()
