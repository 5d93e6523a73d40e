"""The receiving half of an endpoint: checks every chunk before it touches memory, and lets it land in its region.

Chunks of one transfer come in order and without gaps; a transfer that the sender gave up in the middle is followed by
the first chunk of another one. Anything else breaks the rules of the link and raises ``FrameError``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from lockstep.transports.base import PeerAddress
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants, RegionGrant
from lockstep.transports.tcp.frames import FIRST, LAST, LOAN, ChunkHead
from lockstep.transports.tcp.line import Line

Piece = tuple[int, int]
"""An address, and how many bytes."""
NOWHERE: Final[Piece] = (0, 0)


@dataclass(slots=True)
class _Arriving:
    """The transfer whose chunks are arriving."""

    number: int
    grant: RegionGrant
    begin: int
    total: int
    received: int = 0


@dataclass(frozen=True, slots=True)
class LineArrival:
    """A transfer whose bytes are all in place."""

    number: int
    data: memoryview
    loan: bool


class LineLanding:
    """Puts the chunks of one peer in place. Once ``close`` has returned, nothing of it lands any more."""

    def __init__(self, grants: Grants, peer: PeerAddress) -> None:
        self._grants = grants
        self._peer = peer
        self._lock = threading.Lock()
        self._open = True
        self._current: _Arriving | None = None

    def close(self) -> None:
        with self._lock:
            self._open = False

    def bytes_landed(self) -> int:
        """Bytes of the transfer that is arriving."""
        current = self._current
        return 0 if current is None else current.received

    def begin(self, head: ChunkHead) -> RegionGrant:
        """What lets this chunk land."""
        if head.flags & FIRST:
            grant = self._grants.check(self._peer, head.region, head.key, head.offset, head.total)
            self._current = _Arriving(head.transfer, grant, head.offset, head.total)
        arriving = self._continue(head)
        if arriving.received + head.nbytes > arriving.total:
            raise FrameError(f"transfer {head.transfer} sent more than its {arriving.total} bytes")
        return arriving.grant

    def _continue(self, head: ChunkHead) -> _Arriving:
        arriving = self._current
        if (
            arriving is None
            or arriving.number != head.transfer
            or arriving.begin + arriving.received != head.offset
            or arriving.grant.region.number != head.region
            or arriving.grant.key != head.key
        ):
            raise FrameError(f"a chunk of transfer {head.transfer} came out of order")
        return arriving

    def receive(
        self, grant: RegionGrant, line: Line, note: Piece, offset: int, nbytes: int, beyond: Piece = NOWHERE
    ) -> int:
        """Let the bytes that have come land at ``offset`` of the region, after the rest of the note, and what comes
        after them ``beyond``; how many came. ``EOFError`` also if this end has been closed."""
        with self._lock, grant.lock:
            if not self._open:
                raise EOFError
            if not grant.live or grant.region.closed:
                raise FrameError(f"region {grant.region.number} is no longer granted")
            return line.scatter(note, (grant.region.address + offset, nbytes), beyond)

    def end(self, head: ChunkHead) -> LineArrival | None:
        """A chunk is in place; the whole transfer if this was its last."""
        arriving = self._current
        assert arriving is not None
        arriving.received += head.nbytes
        if not head.flags & LAST:
            return None
        if arriving.received != arriving.total:
            raise FrameError(f"transfer {arriving.number} ended after {arriving.received} of {arriving.total} bytes")
        self._current = None
        data = arriving.grant.region.buffer[arriving.begin : arriving.begin + arriving.total]
        return LineArrival(arriving.number, data, bool(head.flags & LOAN))
