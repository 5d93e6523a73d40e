"""The regions of one transport of one task: their numbers, and which peers may write into them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeVar

from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import PeerAddress, Region, TransportError
from lockstep.transports.grants import Grants
from lockstep.transports.memory import HostRegion, allocate_memory, checked_buffer

OnClose = Callable[[int], None]
AnyRegion = TypeVar("AnyRegion", bound=HostRegion)


class Regions:
    """All open regions. ``on_close`` is called with the number of each that is closed."""

    def __init__(self, transport: str, on_close: OnClose = lambda _: None) -> None:
        self.grants = Grants()
        self.numbers = count(1)
        self._transport = transport
        self._on_close = on_close
        self._open: dict[int, HostRegion] = {}

    def add(self, make: Callable[[int, OnClose], AnyRegion]) -> AnyRegion:
        """A new region: ``make`` gets its number, and the function that the region calls when it is closed."""
        region = make(next(self.numbers), self._forget)
        self._open[region.number] = region
        return region

    def allocate(self, nbytes: int, purpose: str) -> Region:
        memory = allocate_memory(nbytes, purpose)
        return self.add(lambda number, on_close: HostRegion(number, memoryview(memory)[:nbytes], memory, on_close))

    def register(self, buffer: memoryview) -> Region:
        plain = checked_buffer(buffer)
        return self.add(lambda number, on_close: HostRegion(number, plain, None, on_close))

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        if not isinstance(region, HostRegion) or self._open.get(region.number) is not region:
            raise TransportError("this region does not belong to this transport: use its allocate or register first")
        return self.grants.give(self._transport, region, peer)

    def _forget(self, number: int) -> None:
        self.grants.withdraw(number)
        self._open.pop(number, None)
        self._on_close(number)

    def close(self) -> None:
        for region in list(self._open.values()):
            region.close()
