"""Which incarnation of which peer may write into which region."""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Callable

from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import PeerAddress
from lockstep.transports.frame_error import FrameError
from lockstep.transports.memory import HostRegion


class RegionGrant:
    """One incarnation of one peer may write into one region, until the grant ends.

    Bytes land under ``lock`` and only while ``live``: once ``end`` has returned, nothing lands through it any more.
    """

    def __init__(self, region: HostRegion, peer: PeerAddress) -> None:
        self.region = region
        self.task = peer.task
        self.incarnation = peer.incarnation
        self.key = secrets.token_bytes(8)
        self.lock = threading.Lock()
        self.live = True
        self._watchers: set[Callable[[], None]] = set()

    def land(self, offset: int, data: memoryview) -> bool:
        """Copy ``data`` to ``offset`` of the region; False if the grant has ended."""
        with self.lock:
            if not self.live or self.region.closed:
                return False
            self.region.buffer[offset : offset + len(data)] = data
            return True

    def land_from(self, offset: int, address: int, nbytes: int) -> bool:
        """The same from an address; the interpreter's lock is free while the bytes move."""
        with self.lock:
            if not self.live or self.region.closed:
                return False
            ctypes.memmove(self.region.address + offset, address, nbytes)
            return True

    def watch(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when the grant ends: for bytes that land without a call of ``land``."""
        with self.lock:
            self._watchers.add(stop)

    def end(self) -> None:
        with self.lock:
            self.live = False
            watchers, self._watchers = self._watchers, set()
        for stop in watchers:
            stop()


class Grants:
    """All grants of one transport."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_place: dict[tuple[int, str], RegionGrant] = {}

    def give(self, transport: str, region: HostRegion, peer: PeerAddress) -> Ticket:
        """Grant ``region`` to this incarnation of the peer, and end the grant of an earlier incarnation there."""
        with self._lock:
            place = (region.number, peer.task)
            grant = self._by_place.get(place)
            if grant is None or grant.incarnation != peer.incarnation:
                if grant is not None:
                    grant.end()
                grant = self._by_place[place] = RegionGrant(region, peer)
        return Ticket(transport, region.number, region.nbytes, 0, grant.key)

    def check(self, peer: PeerAddress, region: int, key: bytes, offset: int, nbytes: int) -> RegionGrant:
        """The grant that lets ``peer`` write this range of ``region``; ``FrameError`` if it has none."""
        with self._lock:
            grant = self._by_place.get((region, peer.task))
        if grant is None or not grant.live or grant.incarnation != peer.incarnation or grant.key != key:
            raise FrameError(f"region {region} was not granted to this incarnation of {peer.task}")
        if offset + nbytes > grant.region.nbytes:
            raise FrameError(
                f"bytes {offset} to {offset + nbytes} are outside region {region} of {grant.region.nbytes} bytes"
            )
        return grant

    def withdraw(self, region: int) -> None:
        """End all grants of a region that is being closed."""
        with self._lock:
            for place in [place for place in self._by_place if place[0] == region]:
                self._by_place.pop(place).end()
