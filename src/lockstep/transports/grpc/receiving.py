"""The receiving half of an endpoint: checks every chunk before it touches memory, and puts it in place.

Chunks of one transfer come in order and without gaps; a transfer that the sender gave up in the middle is followed by
the first chunk of another one. Anything else breaks the rules of the stream and raises ``FrameError``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lockstep.transports.base import PeerAddress
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants, RegionGrant
from lockstep.transports.grpc.chunks import FIRST, LAST
from lockstep.transports.stream.frames import LOAN, Header


@dataclass(slots=True)
class _Incoming:
    """The transfer whose chunks are arriving."""

    number: int
    grant: RegionGrant
    begin: int
    total: int
    received: int = 0


@dataclass(frozen=True, slots=True)
class ChunkArrival:
    """A transfer whose bytes are all in place."""

    number: int
    note: bytes
    data: memoryview
    loan: bool


class ChunkLanding:
    """Puts the chunks of one peer in place. Once ``close`` has returned, none of them lands any more."""

    def __init__(self, grants: Grants, peer: PeerAddress) -> None:
        self._grants = grants
        self._peer = peer
        self._lock = threading.Lock()
        self._open = True
        self._current: _Incoming | None = None

    def close(self) -> None:
        with self._lock:
            self._open = False

    def bytes_landed(self) -> int:
        """Bytes of the transfer that is arriving."""
        current = self._current
        return 0 if current is None else current.received

    def take(self, header: Header, payload: memoryview) -> ChunkArrival | None:
        """Put one chunk in place; the whole transfer if this was its last chunk."""
        if header.note_bytes > len(payload):
            raise FrameError("a chunk is shorter than its note")
        note, data = payload[: header.note_bytes], payload[header.note_bytes :]
        incoming = self._begin(header) if header.flags & FIRST else self._continue(header)
        if incoming.received + len(data) > incoming.total:
            raise FrameError(f"transfer {header.transfer} sent more than its {incoming.total} bytes")
        with self._lock:
            if not self._open:
                return None
            if not incoming.grant.land(header.offset, data):
                raise FrameError(f"region {header.region} is no longer granted")
        incoming.received += len(data)
        if not header.flags & LAST:
            return None
        return self._complete(incoming, header, bytes(note))

    def _begin(self, header: Header) -> _Incoming:
        grant = self._grants.check(self._peer, header.region, header.key, header.offset, header.total)
        self._current = _Incoming(header.transfer, grant, header.offset, header.total)
        return self._current

    def _continue(self, header: Header) -> _Incoming:
        incoming = self._current
        if (
            incoming is None
            or incoming.number != header.transfer
            or incoming.begin + incoming.received != header.offset
            or incoming.grant.region.number != header.region
            or incoming.grant.key != header.key
        ):
            raise FrameError(f"a chunk of transfer {header.transfer} came out of order")
        return incoming

    def _complete(self, incoming: _Incoming, header: Header, note: bytes) -> ChunkArrival:
        if incoming.received != incoming.total:
            raise FrameError(f"transfer {incoming.number} ended after {incoming.received} of {incoming.total} bytes")
        self._current = None
        data = incoming.grant.region.buffer[incoming.begin : incoming.begin + incoming.total]
        return ChunkArrival(incoming.number, note, data, bool(header.flags & LOAN))
