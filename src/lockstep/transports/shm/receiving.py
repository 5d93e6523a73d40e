"""The receiving half of an endpoint: maps the peer's regions, checks its offers, and copies what was written.

The receiver moves the bytes, never the sender: only its owner puts bytes into a region. A peer that wakes up late,
or whose incarnation has ended, cannot write into memory that is in use again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lockstep.transports.base import PeerAddress, TransportError
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants
from lockstep.transports.shm.frames import Offer, unpack_region
from lockstep.transports.shm.memory import PeerRegion
from lockstep.transports.shm.tokens import TOKENS

_COPY_BYTES: Final = 4 << 20
"""After each of these, a copy checks whether the link is still up."""


class OfferLanding:
    """The incoming transfers of one peer. Used only by the endpoint's thread."""

    def __init__(self, grants: Grants, peer: PeerAddress) -> None:
        self._grants = grants
        self._peer = peer
        self._regions: dict[int, PeerRegion] = {}
        self.landed = 0
        """How many bytes of the current copy are in place."""

    def learn(self, frame: bytes, descriptors: list[int]) -> None:
        """The peer announced a region."""
        number, nbytes = unpack_region(frame)
        if len(descriptors) != 1 or number in self._regions:
            raise FrameError(f"region {number} was announced without memory, or twice")
        try:
            self._regions[number] = PeerRegion(nbytes, descriptors[0])
        except TransportError as error:
            raise FrameError(str(error)) from error

    def forget(self, number: int) -> None:
        self._regions.pop(number, None)

    def close(self) -> None:
        self._regions.clear()

    def view(self, offer: Offer) -> memoryview:
        """The bytes of a loan, where they are."""
        return self._source(offer).view(offer.offset, offer.nbytes)

    def _source(self, offer: Offer) -> PeerRegion:
        source = self._regions.get(offer.region)
        if source is None:
            raise FrameError(f"region {offer.region} was never announced")
        if offer.offset + offer.nbytes > source.nbytes or offer.token >= TOKENS:
            raise FrameError(f"transfer {offer.transfer} is outside region {offer.region}")
        return source

    def copy(self, offer: Offer, may_go_on: Callable[[], bool]) -> bool:
        """Put a write in place; False if the link ended in the middle."""
        source = self._source(offer)
        grant = self._grants.check(self._peer, offer.target, offer.key, offer.target_offset, offer.nbytes)
        address = source.address + offer.offset
        self.landed = 0
        while self.landed < offer.nbytes:
            nbytes = min(_COPY_BYTES, offer.nbytes - self.landed)
            if not may_go_on():
                return False
            if not grant.land_from(offer.target_offset + self.landed, address + self.landed, nbytes):
                raise FrameError(f"region {offer.target} is no longer granted")
            self.landed += nbytes
        self.landed = 0
        return True
