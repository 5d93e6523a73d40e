"""The sending half of an endpoint: transfers wait as descriptors, and one thread at a time puts them on the wire.

That thread is the one that starts a transfer, if nothing is in its way: a small tensor leaves in one call, with its
note, before ``start`` returns. What the kernel does not take at once is left to the endpoint's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from lockstep.transports.base import Move, TransferId
from lockstep.transports.landing import FIRST, LAST, LOAN
from lockstep.transports.memory import MAX_NOTE_BYTES, address_of
from lockstep.transports.tcp.frames import (
    CHUNK,
    CHUNK_BYTES,
    HEAD,
    HEAD_BYTES,
    STRIPED,
    STRIPED_BYTES,
    shares,
)
from lockstep.transports.tcp.line import AGAIN, Line
from lockstep.transports.tcp.spreading import Spreading

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


ALL: Final = Pushed.ALL
CLOGGED: Final = Pushed.CLOGGED
"""For every transfer: a member of an enum is looked up ten times as slowly as a name."""


@dataclass(slots=True)
class _Share:
    """What one connection still has to send of the current frame."""

    line: Line
    address: int
    nbytes: int


class SendLines:
    """Orders frames: urgent ones before chunks, chunks by urgency and then in the order of the calls."""

    def __init__(self, on_left: Callable[[LineTransfer], None]) -> None:
        """``on_left``: the kernel has all of a transfer; on the thread that pushed."""
        self._on_left = on_left
        self._lock = threading.Lock()
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[LineTransfer] = deque()
        self._ended = False
        self._wire = threading.Lock()  # held by the thread that pushes; it guards all that follows
        self._lines: Sequence[Line] = ()
        self._spreading: Spreading | None = None
        self._broken = False
        self._current: LineTransfer | None = None
        self._unsent = False  # whether a frame has begun and is not complete
        self._head = memoryview(bytearray(HEAD_BYTES + MAX_NOTE_BYTES))
        self._head_address = address_of(self._head)
        self._head_at = self._head_end = 0
        self._data = self._left = 0  # of the first connection, which has the head
        self._shares: list[_Share] = []  # of the others

    # --- by any thread ------------------------------------------------------------------------------------------

    def add(self, transfer: LineTransfer) -> None:
        """Queue a transfer; it moves with the next ``push`` once the lines are open. After ``end`` it never does."""
        with self._lock:
            if self._ended:
                return
            bulk = self._bulk
            place = len(bulk)
            while place and _yields(bulk[place - 1], transfer):
                place -= 1
            bulk.insert(place, transfer)

    def add_urgent(self, frame: bytes) -> None:
        """Queue a small frame that goes before all chunks."""
        with self._lock:
            if not self._ended:
                self._urgent.append(frame)

    def remove(self, transfer: LineTransfer) -> bool:
        """Take a transfer back; False if its last chunk may have left already."""
        with self._lock:
            if transfer.claimed or transfer not in self._bulk:
                return False
            self._bulk.remove(transfer)
            return True

    def end(self, last: bytes | None) -> None:
        """Send the current frame, then ``last``; drop all other chunks."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._bulk.clear()
                self._urgent.extend([] if last is None else [last])

    def has_work(self) -> bool:
        return bool(self._unsent or self._urgent or self._bulk) and bool(self._lines) and not self._broken

    def take(self, transfer: LineTransfer, most: int) -> Pushed | None:
        """``add`` and ``try_push`` in one: a small transfer that nothing is in the way of is not even queued."""
        nbytes = transfer.move.nbytes
        if nbytes <= CHUNK_BYTES and self._wire.acquire(blocking=False):
            try:
                if not (self._unsent or self._urgent or self._bulk or self._ended or self._broken) and self._lines:
                    transfer.begun, transfer.claimed = nbytes, True
                    self._begin_chunk(transfer, 0, nbytes)
                    return self._push(most)
            finally:
                self._wire.release()
        self.add(transfer)
        return self.try_push(most)

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
        if len(lines) > 1:
            self._spreading = Spreading(lines[0].held_up)
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
            of_first = self._left or self._head_at < self._head_end or not waiting
            return [self._lines[0].descriptor, *waiting] if of_first else waiting

    def close(self) -> None:
        """The connections are about to be closed: nobody may push any more."""
        with self._wire:
            self._lines = ()

    # --- on the wire --------------------------------------------------------------------------------------------

    def _push(self, most: int) -> Pushed:
        if not self._lines or self._broken:
            return ALL
        pushed = 0
        try:
            while self._unsent or self._claim():
                if pushed >= most:
                    return Pushed.ENOUGH
                moved = self._send_frame()
                if moved == AGAIN:
                    return CLOGGED
                pushed += moved
                if not self._unsent:
                    transfer, self._current = self._current, None
                    if transfer is not None and transfer.claimed:
                        transfer.left = True
                        self._on_left(transfer)
        except OSError:  # the receiving half reports it, with what the peer said last
            self._broken = True
        if self._spreading is not None:
            self._spreading.pause()
        return ALL

    def _claim(self) -> bool:
        """Make the next frame the current one; False if there is none."""
        if not self._urgent and not self._bulk:
            return False
        with self._lock:
            if self._urgent:
                self._begin_urgent(self._urgent.popleft())
                return True
            if not self._bulk:
                return False
            transfer = self._bulk[0]
            begin, total = transfer.begun, transfer.move.nbytes
            transfer.begun = end = min(begin + CHUNK_BYTES, total)
            if end == total:
                transfer.claimed = True
                self._bulk.popleft()
        self._begin_chunk(transfer, begin, end)
        return True

    def _begin_urgent(self, frame: bytes) -> None:
        self._head[: len(frame)] = frame
        self._head_at, self._head_end = 0, len(frame)
        self._unsent = True

    def _begin_chunk(self, transfer: LineTransfer, begin: int, end: int) -> None:
        move, nbytes = transfer.move, end - begin
        note = move.note if transfer.claimed else b""
        flags = (FIRST if begin == 0 else 0) | (LAST if transfer.claimed else 0) | (LOAN if move.loan else 0)
        self._data, self._left = transfer.address + begin, nbytes
        if nbytes >= STRIPED_BYTES and self._spreading is not None and self._spreading.decide():
            flags |= STRIPED
            self._spread(nbytes)
        target = move.target
        place = (transfer.number, target.region, target.key, move.target_offset + begin, move.nbytes)
        HEAD.pack_into(self._head, 0, CHUNK, flags, len(note), nbytes, *place)
        self._head_at, self._head_end = 0, HEAD_BYTES + len(note)
        if note:
            self._head[HEAD_BYTES : self._head_end] = note
        self._current = transfer
        self._unsent = True

    def _spread(self, nbytes: int) -> None:
        (_, self._left), *others = shares(nbytes, len(self._lines))
        places = zip(self._lines[1:], others, strict=True)
        self._shares = [_Share(line, self._data + begin, end - begin) for line, (begin, end) in places if end > begin]

    def _send_frame(self) -> int:
        """Bytes that the kernel took of the current frame, over all connections; ``AGAIN`` if none."""
        head, left, moved = self._head_end - self._head_at, self._left, AGAIN
        if head or left:
            moved = self._lines[0].send(self._head_address + self._head_at, head, self._data, left)
            if moved == head + left and not self._shares:  # as almost always for a small one
                self._head_at, self._left, self._unsent = self._head_end, 0, False
                return moved
            if moved != AGAIN:
                of_head = min(head, moved)
                self._head_at += of_head
                self._data += moved - of_head
                self._left -= moved - of_head
        if self._shares:
            moved = self._send_shares(moved)
        self._unsent = bool(self._left or self._shares or self._head_at < self._head_end)
        return moved

    def _send_shares(self, total: int) -> int:
        for share in self._shares:
            moved = share.line.send(0, 0, share.address, share.nbytes)
            if moved != AGAIN:
                total = moved if total == AGAIN else total + moved
                share.address += moved
                share.nbytes -= moved
        self._shares = [share for share in self._shares if share.nbytes]
        return total

    def bytes_of(self, transfer: LineTransfer) -> int:
        """How many bytes of a transfer are on their way; not exact while it is being sent."""
        unsent = self._left + sum(share.nbytes for share in self._shares) if self._current is transfer else 0
        return max(0, transfer.begun - unsent)


def _yields(first: LineTransfer, second: LineTransfer) -> bool:
    """One that has begun is not overtaken: the other end takes the chunks of one transfer at a time."""
    return first.move.urgency < second.move.urgency and not first.begun
