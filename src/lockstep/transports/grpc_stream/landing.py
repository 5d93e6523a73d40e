"""The receiving half of an endpoint: checks every chunk before it touches memory, and puts it in place.

Chunks of one transfer come in order and without gaps; a transfer that the sender gave up in the middle is followed by
the first chunk of another one. Whatever else comes breaks the rules of the stream and raises ``FrameError``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lockstep.transports.grants import Grant, Grants
from lockstep.transports.grpc_stream.frames import FIRST, LAST, LOAN, FrameError, Header


@dataclass(slots=True)
class _Incoming:
    """The transfer whose chunks are coming in."""

    number: int
    grant: Grant
    begin: int
    total: int
    received: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A transfer of which all bytes are in place."""

    number: int
    note: bytes
    data: memoryview
    loan: bool


class Landing:
    """Where the chunks of one peer come down. Once ``close`` has returned, nothing of it lands any more."""

    def __init__(self, grants: Grants, task: str, incarnation: int) -> None:
        self._grants = grants
        self._task = task
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._open = True
        self._current: _Incoming | None = None

    def close(self) -> None:
        with self._lock:
            self._open = False

    def bytes_landed(self) -> int:
        """Bytes of the transfer that is coming in."""
        current = self._current
        return 0 if current is None else current.received

    def take(self, header: Header, payload: memoryview) -> Arrival | None:
        """Put one chunk in place; the whole transfer if this was its last one."""
        if header.note_bytes > len(payload):
            raise FrameError("a chunk is shorter than its note")
        note, data = payload[: header.note_bytes], payload[header.note_bytes :]
        incoming = self._begin(header) if header.flags & FIRST else self._continue(header)
        if incoming.received + len(data) > incoming.total:
            raise FrameError(f"transfer {header.transfer} brought more than its {incoming.total} bytes")
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
        grant = self._grants.find(header.region, self._task, self._incarnation, header.key)
        if grant is None:
            raise FrameError(f"region {header.region} was not granted to this life of {self._task}")
        if header.offset + header.total > grant.region.nbytes:
            raise FrameError(
                f"bytes {header.offset} to {header.offset + header.total} do not lie in region {header.region} "
                f"of {grant.region.nbytes}"
            )
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

    def _complete(self, incoming: _Incoming, header: Header, note: bytes) -> Arrival:
        if incoming.received != incoming.total:
            raise FrameError(f"transfer {incoming.number} ended after {incoming.received} of {incoming.total} bytes")
        self._current = None
        data = incoming.grant.region.buffer[incoming.begin : incoming.begin + incoming.total]
        return Arrival(incoming.number, note, data, bool(header.flags & LOAN))
