"""The sending half of an endpoint: transfers wait as descriptors, and one thread at a time puts them on the wire.

That thread is the one that starts a transfer, if nothing is in its way: a small tensor leaves in one call, with its
note, before ``start`` returns. What the kernel does not take at once is left to the endpoint's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from lockstep.transports.base import Move, TransferId
from lockstep.transports.memory import MAX_NOTE_BYTES, address_of
from lockstep.transports.tcp.frames import (
    CHUNK_BYTES,
    FIRST,
    HEAD,
    HEAD_BYTES,
    LAST,
    LOAN,
    STRIPED,
    STRIPED_BYTES,
    LineFrame,
    shares,
)
from lockstep.transports.tcp.line import AGAIN, Line

INLINE_BYTES: Final = 1 << 20
"""So much of a transfer its starter puts on the wire: what takes longer is not the business of a thread that has
something else to do."""


@dataclass(slots=True, eq=False)
class LineTransfer:
    """One write or loan whose end has not been reported yet."""

    number: TransferId
    move: Move
    memory: memoryview
    """Keeps the source alive, even if its region is closed while a chunk is on its way."""
    address: int
    begun: int = 0
    """How many bytes have been claimed for chunks."""
    claimed: bool = False
    """Its last chunk has been claimed: it can no longer be taken back."""
    left: bool = False
    """The kernel has all of it."""


class Pushed(Enum):
    """How far ``push`` came."""

    ALL = auto()
    CLOGGED = auto()
    """The kernel takes no more now."""
    ENOUGH = auto()
    """There is more, but not for this thread."""


@dataclass(slots=True)
class _Share:
    """What one connection still has to send of the current frame."""

    line: Line
    address: int
    nbytes: int


@dataclass(slots=True)
class _Waiting:
    """What has not been claimed yet."""

    urgent: deque[bytes] = field(default_factory=deque)
    bulk: deque[LineTransfer] = field(default_factory=deque)
    ended: bool = False


class SendLines:
    """Orders frames: urgent ones before chunks, chunks by urgency and then in the order of the calls."""

    def __init__(self, on_left: Callable[[LineTransfer], None]) -> None:
        """``on_left``: the kernel has all of a transfer; on the thread that pushed."""
        self._on_left = on_left
        self._lock = threading.Lock()
        self._waiting = _Waiting()
        self._wire = threading.Lock()  # held by the thread that pushes
        self._lines: Sequence[Line] = ()
        self._head = memoryview(bytearray(HEAD_BYTES + MAX_NOTE_BYTES))
        self._head_address = address_of(self._head)
        self._head_at = self._head_end = 0
        self._shares: list[_Share] = []
        self._current: LineTransfer | None = None
        self._broken = False

    # --- by any thread ------------------------------------------------------------------------------------------

    def add(self, transfer: LineTransfer) -> None:
        """Queue a transfer; it moves with the next ``push`` once the lines are open."""
        with self._lock:
            bulk = self._waiting.bulk
            place = len(bulk)
            while place and _yields(bulk[place - 1], transfer):
                place -= 1
            bulk.insert(place, transfer)

    def add_urgent(self, frame: bytes) -> None:
        """Queue a small frame that goes before all chunks."""
        with self._lock:
            if not self._waiting.ended:
                self._waiting.urgent.append(frame)

    def remove(self, transfer: LineTransfer) -> bool:
        """Take a transfer back; False if its last chunk may have left already."""
        with self._lock:
            if transfer.claimed or transfer not in self._waiting.bulk:
                return False
            self._waiting.bulk.remove(transfer)
            return True

    def end(self, last: bytes | None) -> None:
        """Send the current frame, then ``last``; drop all other chunks."""
        with self._lock:
            if not self._waiting.ended:
                self._waiting.ended = True
                self._waiting.bulk.clear()
                self._waiting.urgent.extend([] if last is None else [last])

    def has_work(self) -> bool:
        return bool(self._lines) and not self._broken and (self._in_frame() or self._is_waiting())

    def _is_waiting(self) -> bool:
        return bool(self._waiting.urgent or self._waiting.bulk)

    def _in_frame(self) -> bool:
        return self._head_at < self._head_end or bool(self._shares)

    def try_push(self, most: int) -> Pushed | None:
        """Push, unless another thread does: None, and that one looks again for what was added meanwhile."""
        if not self._wire.acquire(blocking=False):
            return None
        try:
            return self._push(most)
        finally:
            self._wire.release()

    # --- by the endpoint's thread -------------------------------------------------------------------------------

    def open(self, lines: Sequence[Line]) -> None:
        """The peer has connected: let chunks move."""
        self._lines = lines

    def push(self, most: int) -> Pushed:
        """Send about so many bytes, as far as the kernel takes them."""
        with self._wire:
            return self._push(most)

    def settle_pushing(self) -> None:
        """Wait until what another thread pushes at this moment is booked; it never waits for the network."""
        with self._wire:
            pass

    def clogged(self) -> list[int]:
        """The descriptors that must be writable before more can be sent."""
        with self._wire:
            waiting = [share.line.descriptor for share in self._shares]
            return waiting or [self._lines[0].descriptor]

    def close(self) -> None:
        """The connections are about to be closed: nobody may push any more."""
        with self._wire:
            self._lines = ()

    # --- on the wire --------------------------------------------------------------------------------------------

    def _push(self, most: int) -> Pushed:
        if not self._lines or self._broken:
            return Pushed.ALL
        pushed = 0
        try:
            while self._in_frame() or self._claim():
                if pushed >= most:
                    return Pushed.ENOUGH
                moved = self._send_frame()
                if moved == AGAIN:
                    return Pushed.CLOGGED
                pushed += moved
                if not self._in_frame():
                    self._frame_left()
        except OSError:  # the receiving half reports it, with what the peer said last
            self._broken = True
        return Pushed.ALL

    def _claim(self) -> bool:
        """Make the next frame the current one; False if there is none."""
        with self._lock:
            waiting = self._waiting
            if waiting.urgent:
                frame = waiting.urgent.popleft()
                self._head[: len(frame)] = frame
                self._head_at, self._head_end = 0, len(frame)
                return True
            if not waiting.bulk:
                return False
            transfer = waiting.bulk[0]
            begin, total = transfer.begun, transfer.move.nbytes
            end = min(begin + CHUNK_BYTES, total)
            transfer.begun = end
            if end == total:
                transfer.claimed = True
                waiting.bulk.popleft()
        self._begin_chunk(transfer, begin, end)
        return True

    def _begin_chunk(self, transfer: LineTransfer, begin: int, end: int) -> None:
        move, nbytes, count = transfer.move, end - begin, len(self._lines)
        note = move.note if transfer.claimed else b""
        flags = (FIRST if begin == 0 else 0) | (LAST if transfer.claimed else 0) | (LOAN if move.loan else 0)
        spread = [(0, nbytes)]
        if count > 1 and nbytes >= STRIPED_BYTES:
            flags |= STRIPED
            spread = shares(nbytes, count)
        target = move.target
        place = (transfer.number, target.region, target.key, move.target_offset + begin, move.nbytes)
        HEAD.pack_into(self._head, 0, LineFrame.CHUNK, flags, len(note), nbytes, *place)
        self._head_at, self._head_end = 0, HEAD_BYTES + len(note)
        if note:
            self._head[HEAD_BYTES : self._head_end] = note
        at = transfer.address + begin
        places = zip(self._lines, spread, strict=False)
        self._shares = [_Share(line, at + first, last - first) for line, (first, last) in places if last > first]
        self._current = transfer

    def _send_frame(self) -> int:
        """Bytes that the kernel took of the current frame, over all connections; ``AGAIN`` if none."""
        total = AGAIN
        head = self._head_end - self._head_at
        if head and not (self._shares and self._shares[0].line is self._lines[0]):
            moved = self._lines[0].send(self._head_address + self._head_at, head, 0, 0)
            if moved != AGAIN:
                self._head_at += moved
                total = moved
        for share in self._shares:
            head = self._head_end - self._head_at if share.line is self._lines[0] else 0
            moved = share.line.send(self._head_address + self._head_at, head, share.address, share.nbytes)
            if moved == AGAIN:
                continue
            total = moved if total == AGAIN else total + moved
            of_head = min(head, moved)
            self._head_at += of_head
            share.address += moved - of_head
            share.nbytes -= moved - of_head
        if any(not share.nbytes for share in self._shares):
            self._shares = [share for share in self._shares if share.nbytes]
        return total

    def _frame_left(self) -> None:
        transfer, self._current = self._current, None
        if transfer is not None and transfer.claimed:
            transfer.left = True
            self._on_left(transfer)

    def bytes_of(self, transfer: LineTransfer) -> int:
        """How many bytes of a transfer are on their way; not exact while it is being sent."""
        unsent = sum(share.nbytes for share in self._shares) if self._current is transfer else 0
        return max(0, transfer.begun - unsent)


def _yields(first: LineTransfer, second: LineTransfer) -> bool:
    """One that has begun is not overtaken: the other end takes the chunks of one transfer at a time."""
    return first.move.urgency < second.move.urgency and not first.begun
