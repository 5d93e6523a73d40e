"""The sending half of an endpoint: transfers wait as descriptors and become chunks only when gRPC asks for one.

gRPC asks for the next frame when it has taken the one before, so what is in flight toward it never exceeds one chunk
and its own buffers, however much waits here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.protocol.messages import Ticket
from lockstep.transports.base import TransferId
from lockstep.transports.grpc_stream.frames import CHUNK_BYTES, FIRST, LAST, LOAN, Header, Kind, pack


@dataclass(slots=True, eq=False)
class Transfer:
    """One write or loan that has not been settled yet."""

    number: TransferId
    data: memoryview
    target: Ticket
    target_offset: int
    note: bytes
    loan: bool
    urgency: int = 0
    begun: int = 0
    """How many bytes have become chunks."""


class Sender:
    """Orders frames: what is urgent before bulk, bulk by its urgency and then in the order of the calls."""

    def __init__(self, on_left: Callable[[Transfer], None]) -> None:
        self._on_left = on_left
        self._wake = threading.Condition()
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[Transfer] = deque()
        self._flowing = False
        self._ended = False

    def add(self, transfer: Transfer) -> None:
        """Queue a transfer; it moves once ``flow`` was called."""
        with self._wake:
            place = len(self._bulk)
            # One that has begun is not overtaken: the other end takes the chunks of one transfer at a time.
            while place and self._bulk[place - 1].urgency < transfer.urgency and not self._bulk[place - 1].begun:
                place -= 1
            self._bulk.insert(place, transfer)
            self._wake.notify()

    def add_urgent(self, frame: bytes) -> None:
        """Queue a small frame that goes before all bulk."""
        with self._wake:
            if not self._ended:
                self._urgent.append(frame)
                self._wake.notify()

    def flow(self) -> None:
        """The peer is there: let bulk move."""
        with self._wake:
            self._flowing = True
            self._wake.notify()

    def remove(self, transfer: Transfer) -> bool:
        """Take a transfer back; False where its last chunk has left already."""
        with self._wake:
            if transfer not in self._bulk:
                return False
            self._bulk.remove(transfer)
            return True

    def end(self, last: bytes | None = None) -> None:
        """Send what is urgent, then ``last``, then end the stream. Bulk that waits is dropped."""
        with self._wake:
            if self._ended:
                return
            self._ended = True
            self._bulk.clear()
            if last is not None:
                self._urgent.append(last)
            self._wake.notify()

    def frames(self) -> Iterator[bytes]:
        """What the stream sends. Runs on gRPC's thread, which is this endpoint's sender for as long."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                if self._urgent:
                    frame, claim = self._urgent.popleft(), None
                elif self._ended:
                    return
                else:
                    claim = self._claim()
            if claim is None:
                yield frame
                continue
            transfer, begin, end = claim
            yield _chunk(transfer, begin, end)
            if end == transfer.data.nbytes:
                self._on_left(transfer)

    def _has_work(self) -> bool:
        return bool(self._urgent or self._ended or (self._bulk and self._flowing))

    def _claim(self) -> tuple[Transfer, int, int]:
        """The next range to send; the last one takes its transfer out of the queue, and it can no more be removed."""
        transfer = self._bulk[0]
        begin, total = transfer.begun, transfer.data.nbytes
        end = transfer.begun = min(begin + CHUNK_BYTES, total)
        if end == total:
            self._bulk.popleft()
        return transfer, begin, end


def _chunk(transfer: Transfer, begin: int, end: int) -> bytes:
    """One chunk as a frame: here the bytes are copied, outside of every lock."""
    total = transfer.data.nbytes
    note = transfer.note if end == total else b""
    header = Header(
        kind=Kind.CHUNK,
        flags=(FIRST if begin == 0 else 0) | (LAST if end == total else 0) | (LOAN if transfer.loan else 0),
        note_bytes=len(note),
        transfer=transfer.number,
        region=transfer.target.region,
        key=transfer.target.key,
        offset=transfer.target_offset + begin,
        total=total,
    )
    return pack(header, note, transfer.data[begin:end])
