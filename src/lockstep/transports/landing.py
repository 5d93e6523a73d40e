"""Where the chunks of a peer land: every transport that sends tensors in chunks keeps these books.

Chunks of one transfer come in order and without gaps; a transfer that the sender gave up in the middle is followed by
the first chunk of another one. Anything else breaks the rules of the link and raises ``FrameError``, before a byte of
it touches memory.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

from lockstep.transports.base import PeerAddress
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants, RegionGrant

# Flags of a chunk; plain numbers, because every chunk is tested for them.
FIRST: Final = 1
LAST: Final = 2
WHOLE: Final = FIRST | LAST
LOAN: Final = 4
"""The transfer is a loan; also a flag of other frames about one."""


class ChunkPlace(Protocol):
    """What the head of a chunk says about its place. ``total`` is the size of the whole transfer."""

    @property
    def flags(self) -> int: ...

    @property
    def transfer(self) -> int: ...

    @property
    def region(self) -> int: ...

    @property
    def key(self) -> bytes: ...

    @property
    def offset(self) -> int: ...

    @property
    def total(self) -> int: ...


class ArrivingTransfer:
    """A transfer whose chunks are arriving, or have arrived."""

    __slots__ = ("begin", "grant", "key", "lands", "loan", "number", "received", "total")

    def __init__(self, chunk: ChunkPlace, grant: RegionGrant) -> None:
        self.number = chunk.transfer
        self.grant = grant
        self.key = chunk.key
        self.lands = grant.lets_in(chunk.key, chunk.offset)
        self.begin = chunk.offset
        self.total = chunk.total
        self.loan = False  # known with its last chunk
        self.received = 0

    @property
    def data(self) -> memoryview:
        """Where its bytes are."""
        return self.grant.region.buffer[self.begin : self.begin + self.total]


class Landing:
    """The incoming transfers of one peer. A transport adds how bytes get into memory: under ``lock`` and the grant's,
    and only while ``is_open``, so that nothing lands any more once ``close`` has returned."""

    def __init__(self, grants: Grants, peer: PeerAddress) -> None:
        self._grants = grants
        self._peer = peer
        self.lock = threading.Lock()
        self.is_open = True
        self._current: ArrivingTransfer | None = None

    def close(self) -> None:
        with self.lock:
            self.is_open = False

    def bytes_landed(self) -> int:
        """Bytes of the transfer that is arriving."""
        current = self._current
        return 0 if current is None else current.received

    def begin(self, chunk: ChunkPlace, nbytes: int) -> RegionGrant:
        """A chunk of so many bytes has come: what lets it land."""
        if chunk.flags & FIRST:
            grant = self._grants.check(self._peer, chunk.region, chunk.key, chunk.offset, chunk.total)
            arriving = self._current = self._arrival(chunk, grant)
        else:
            arriving = self._continued(chunk)
        if arriving.received + nbytes > arriving.total:
            raise FrameError(f"transfer {chunk.transfer} sent more than its {arriving.total} bytes")
        return arriving.grant

    def whole(self, chunk: ChunkPlace, nbytes: int) -> RegionGrant:
        """Instead of ``begin``, and of ``end`` unless its grant lets it land once, for a transfer that is one chunk:
        there is nothing to remember."""
        grant = self._grants.check(self._peer, chunk.region, chunk.key, chunk.offset, chunk.total)
        self._current = self._arrival(chunk, grant) if grant.once else None
        if nbytes != chunk.total:
            raise FrameError(f"transfer {chunk.transfer} has {nbytes} of {chunk.total} bytes in its only chunk")
        return grant

    @staticmethod
    def _arrival(chunk: ChunkPlace, grant: RegionGrant) -> ArrivingTransfer:
        if grant.once and chunk.flags & LOAN:
            raise FrameError(f"what lands once in region {chunk.region} cannot be lent")
        return ArrivingTransfer(chunk, grant)

    @staticmethod
    def _may_land(arriving: ArrivingTransfer) -> bool:
        """Whether this transfer is not thrown away: it was let in, and what let it in still does."""
        return arriving.lands and arriving.grant.lets_in(arriving.key, arriving.begin)

    def lands(self) -> bool:
        """Whether the chunk that is arriving is to land; under its grant's lock."""
        return self._current is None or self._may_land(self._current)

    def _continued(self, chunk: ChunkPlace) -> ArrivingTransfer:
        arriving = self._current
        if (
            arriving is None
            or arriving.number != chunk.transfer
            or arriving.begin + arriving.received != chunk.offset
            or arriving.grant.region.number != chunk.region
            or arriving.key != chunk.key
        ):
            raise FrameError(f"a chunk of transfer {chunk.transfer} came out of order")
        return arriving

    def end(self, chunk: ChunkPlace, nbytes: int) -> ArrivingTransfer | None:
        """A chunk is in place; the whole transfer if this was its last, and if it has not been thrown away."""
        arriving = self._current
        assert arriving is not None
        arriving.received += nbytes
        if not chunk.flags & LAST:
            return None
        if arriving.received != arriving.total:
            raise FrameError(f"transfer {arriving.number} ended after {arriving.received} of {arriving.total} bytes")
        self._current = None
        if not self._may_land(arriving):
            return None
        arriving.grant.has_landed(arriving.key, arriving.begin)
        arriving.loan = chunk.flags & LOAN != 0
        return arriving
