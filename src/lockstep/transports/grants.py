"""Which incarnation of which peer may write into which region."""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import PeerAddress
from lockstep.transports.frame_error import FrameError
from lockstep.transports.memory import HostRegion

_FORMER_KEYS: Final = 1024
"""Of a grant that lets everything land once: what is on its way may have one of the last few."""


class RegionGrant:
    """One incarnation of one peer may write into one region, until the grant ends.

    Bytes land under ``lock`` and only while ``live``: once ``end`` has returned, nothing lands through it any more.

    ``once``: what has landed whole does not land again before ``renew``, and what began before it does not land at all.
    """

    def __init__(self, region: HostRegion, peer: PeerAddress, *, once: bool = False) -> None:
        self.region = region
        self.once = once
        self._former: deque[bytes] = deque(maxlen=_FORMER_KEYS)
        self._landed: set[int] = set()
        self.task = peer.task
        self.incarnation = peer.incarnation
        self.key = secrets.token_bytes(8)
        self.lock = threading.Lock()
        self.live = True
        self._watchers: set[Callable[[], None]] = set()

    def renew(self) -> None:
        """Let everything land once more, by another key."""
        with self.lock:
            self._former.append(self.key)
            self._landed.clear()
            self.key = secrets.token_bytes(8)

    def knows(self, key: bytes) -> bool:
        """Whether the peer has, or had, this key."""
        return key == self.key or key in self._former

    def lets_in(self, key: bytes, offset: int) -> bool:
        """Whether what comes with this key may land there now; otherwise it is thrown away."""
        return not self.once or (key == self.key and offset not in self._landed)

    def has_landed(self, key: bytes, offset: int) -> None:
        if self.once:
            with self.lock:
                if key == self.key:
                    self._landed.add(offset)

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

    def give_once(self, transport: str, region: HostRegion, peer: PeerAddress) -> Ticket:
        """The same for a grant by which each range lands once. Nothing lands by an earlier ticket of it any more."""
        with self._lock:
            place = (region.number, peer.task)
            grant = self._by_place.get(place)
            if grant is not None and grant.once and grant.incarnation == peer.incarnation:
                grant.renew()
            else:
                if grant is not None:
                    grant.end()
                grant = self._by_place[place] = RegionGrant(region, peer, once=True)
        return Ticket(transport, region.number, region.nbytes, 0, grant.key)

    def check(self, peer: PeerAddress, region: int, key: bytes, offset: int, nbytes: int) -> RegionGrant:
        """The grant that lets ``peer`` write this range of ``region``; ``FrameError`` if it has none."""
        with self._lock:
            grant = self._by_place.get((region, peer.task))
        if grant is None or not grant.live or grant.incarnation != peer.incarnation or not grant.knows(key):
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
