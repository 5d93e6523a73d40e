"""One end of a ``grpc+tcp`` link.

One thread serves it: it receives, makes every callback, and sends what the kernel did not take from the threads that
started transfers.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from lockstep.protocol.core.causes import link_down
from lockstep.protocol.core.messages import Ticket
from lockstep.protocol.core.timing import CUT_SECONDS, FLUSH_SECONDS
from lockstep.transports.base import (
    EndpointEvents,
    LinkState,
    Move,
    PeerAddress,
    Region,
    TransferId,
    TransportError,
)
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants, RegionGrant
from lockstep.transports.landing import LOAN, WHOLE
from lockstep.transports.lifecycle import Lifecycle
from lockstep.transports.loan import HeldLoan
from lockstep.transports.memory import MAX_NOTE_BYTES, SOURCE_NOT_OPEN, HostRegion, address_of, check_move
from lockstep.transports.tcp.frames import (
    CHUNK,
    HEAD_BYTES,
    STRIPED,
    ChunkHead,
    LineFrame,
    pack_fault,
    pack_goodbye,
    pack_release,
    shares,
    text_of,
    unpack_head,
)
from lockstep.transports.tcp.line import AGAIN, Bell, Line
from lockstep.transports.tcp.receiving import NOWHERE, LineLanding
from lockstep.transports.tcp.sending import ALL, CLOGGED, INLINE_BYTES, LineTransfer, Pushed, SendLines

NAME: Final = "grpc+tcp"
PRIVATE: Final = "tls://"
"""Before the published address of a task whose connections are encrypted."""
UP: Final = LinkState.UP
_SCRATCH_BYTES: Final = 256 << 10


class _Ended(Exception):  # noqa: N818  # not an error: how receiving stops
    """Why no more frames are received; the text is the phrase for ``on_lost``."""


class TcpEndpoint:
    """Moves ranges of regions to one incarnation of one peer. ``run`` is called on the endpoint's own thread."""

    def __init__(self, peer: PeerAddress, grants: Grants, events: EndpointEvents) -> None:
        self.peer = peer
        self._events = events
        self._cycle = Lifecycle(peer.task)
        self._lock = self._cycle.lock  # unsettled transfers
        self._unsettled: dict[TransferId, LineTransfer] = {}
        self._done: deque[TransferId] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._out = SendLines(self._on_left)
        self._grants = grants
        self._landing = LineLanding(grants, peer)
        self._bell = Bell()
        self._lines: Sequence[Line] = ()
        self._first: Sequence[Line] = ()
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._head_address = address_of(self._head)
        self._beyond = self._head_address, HEAD_BYTES
        self._ahead = 0  # bytes of the next head that came with the frame before
        self._drained = False  # nothing has come since: receiving would be in vain
        self._note = memoryview(bytearray(MAX_NOTE_BYTES))
        self._note_address = address_of(self._note)
        self.attach = self._cycle.attach
        self.counters = self._cycle.counters

    def __repr__(self) -> str:
        return f"<TcpEndpoint to {self.peer.task} {self.state.value}>"

    @property
    def state(self) -> LinkState:
        return self._cycle.state

    @property
    def transport(self) -> str:
        return NAME

    @property
    def lends_in_place(self) -> bool:
        return False

    def path(self) -> str:
        several = f" ({len(self._lines)} connections)" if len(self._lines) > 1 else ""
        encrypted = "encrypted " if any(line.is_private for line in self._first) else ""
        return f"{encrypted}TCP to {self.peer.address.decode(errors='replace').removeprefix(PRIVATE)}{several}"

    # --- by any thread ------------------------------------------------------------------------------------------

    def start(self, move: Move) -> TransferId:
        source = check_move(NAME, move)
        number = next(self._cycle.numbers)
        transfer = LineTransfer(number, move, source.buffer, source.address + move.offset)
        with self._lock:
            self._cycle.refuse_if_over()
            self._unsettled[number] = transfer
        self._send_here(self._out.take(transfer, INLINE_BYTES))
        return number

    def _send_here(self, pushed: Pushed | None) -> None:
        """Send on this thread what the kernel takes at once; the endpoint's thread does the rest."""
        while pushed is ALL and self._out.has_work():
            pushed = self._out.try_push(INLINE_BYTES)
        if self._cycle.on_own_thread:
            return
        if pushed is not ALL:
            self._bell.ring()
        elif self._done:
            self._bell.ring_soon()

    def _on_left(self, transfer: LineTransfer) -> None:
        """The kernel has all of a transfer; on the thread that pushed, which may hold locks of its own."""
        self._cycle.count_sent(transfer.move.nbytes, transfer.move.loan)
        if not transfer.move.loan:
            self._done.append(transfer.number)

    def grant_once(self, region: Region) -> Ticket | None:
        if not isinstance(region, HostRegion) or region.closed:
            raise TransportError(SOURCE_NOT_OPEN)
        return self._grants.give_once(NAME, region, self.peer)

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            known = self._unsettled.get(transfer)
        if known is not None and self._out.remove(known):
            self._jobs.append(lambda: self._fail(transfer, "cancelled"))
            self._bell.ring()

    def bytes_under_way(self) -> int:
        with self._lock:
            sending = [transfer for transfer in self._unsettled.values() if transfer.begun and not transfer.left]
        return sum(map(self._out.bytes_of, sending)) + self._landing.bytes_landed()

    def close(self) -> None:
        self._cycle.close()
        self._landing.close()
        self._cycle.interrupt()
        if not self._cycle.on_own_thread:
            self._cycle.ended.wait(FLUSH_SECONDS + CUT_SECONDS)

    # --- the course of the link, on the endpoint's thread -------------------------------------------------------

    def run(self, talk: Callable[[], str]) -> None:
        """Serve the link: ``talk`` connects, receives to the end, and returns the reason for the end."""
        self._cycle.run(talk, self._finish)

    def converse(self, lines: Sequence[Line]) -> str:
        """Both ends have proven themselves: receive until the link ends; returns the reason for the end."""
        self._lines, self._first = lines, lines[:1]
        self._quiet = self._poller(self._first, ())
        self.attach(self._bell.ring)
        if not self._cycle.go_up():
            return self._cycle.reason
        self._events.on_up()
        self._out.open(lines)
        try:
            while self._cycle.state is UP:
                self._on_frame()
        except _Ended as end:
            return str(end)
        except EOFError:
            if self.state is UP:
                return "the connection ended without a goodbye"
        except OSError as error:
            return f"the connection ended without a goodbye ({error.strerror})"
        except FrameError as fault:
            self._part(pack_fault(str(fault)))
            return f"{self.peer.task} was cut off because it broke the rules of the link: {fault}"
        self._part(pack_goodbye())
        return self._cycle.reason

    def _on_frame(self) -> None:
        if self._drained:
            self._wait(self._first)
        elif self._done or self._jobs or self._out.has_work():
            self._serve()
        if self._ahead < HEAD_BYTES:
            self._fill(self._head_address, HEAD_BYTES, self._ahead)
        self._ahead = 0
        head = unpack_head(self._head)
        if head.kind == CHUNK:
            self._take(head)
            return
        self._fill(self._note_address, head.note_bytes)
        if head.kind == LineFrame.RELEASE:
            self._on_release(head.transfer)
        elif head.kind == LineFrame.FAULT:
            raise _Ended(f"{self.peer.task} cut this end off: {text_of(bytes(self._note[: head.note_bytes]))}")
        else:
            raise _Ended("closed by the peer")

    def _serve(self) -> Pushed:
        """Everything that is not receiving: what waits to be sent, and callbacks that are due, which may send more."""
        while True:
            pushed = self._out.push(INLINE_BYTES) if self._out.has_work() else ALL
            if not self._done and not self._jobs:
                return pushed
            while self._done:
                self._settle(self._done.popleft())
            while self._jobs:
                self._jobs.popleft()()

    # --- receiving ----------------------------------------------------------------------------------------------

    def _fill(self, address: int, nbytes: int, at: int = 0) -> None:
        """Receive so many bytes into memory of this endpoint; ``at``: so many are there."""
        line = self._lines[0]
        while at < nbytes:
            got = line.receive(address + at, nbytes - at)
            if got == AGAIN:
                line.expect(1)
                self._wait(self._first)
            else:
                at += got

    def _take(self, head: ChunkHead) -> None:
        flags, begin, total = head.flags, head.offset, head.total
        whole = flags & WHOLE == WHOLE
        grant = self._landing.whole(head, head.nbytes) if whole else self._landing.begin(head, head.nbytes)
        if flags & STRIPED:
            self._fill(self._note_address, head.note_bytes)
            self._land_striped(grant, head)
        else:
            self._land(grant, head)
        if not whole or grant.once:
            arrival = self._landing.end(head, head.nbytes)
            if arrival is None:
                return
            begin, total = arrival.begin, arrival.total
        if self._cycle.state is UP:
            note = bytes(self._note[: head.note_bytes]) if head.note_bytes else b""
            if flags & LOAN:
                self._deliver_loan(head.transfer, note, grant.region.buffer[begin : begin + total])
            else:
                self._cycle.count_received(total, loan=False)
                self._events.on_arrived(note, total)

    def _land(self, grant: RegionGrant, head: ChunkHead) -> None:
        """The note and the bytes, in one call where they have come already, and the next head with them."""
        line, at, note_bytes, nbytes = self._lines[0], 0, head.note_bytes, head.nbytes
        end = note_bytes + nbytes
        while at < end:
            of_note = min(at, note_bytes)
            of_data = at - of_note
            note = (self._note_address + of_note, note_bytes - of_note)
            got = self._landing.receive(grant, line, note, head.offset + of_data, nbytes - of_data, self._beyond)
            if got == AGAIN:
                line.expect(end - at)
                self._wait(self._first)
            else:
                at += got
        self._ahead = at - end
        if self._ahead < HEAD_BYTES:
            line.expect(1)
            self._drained = end > 0 or not line.is_private  # that line may hold more, and nobody has asked it

    def _land_striped(self, grant: RegionGrant, head: ChunkHead) -> None:
        """The shares of all connections, in the order in which they come."""
        shared = shares(head.nbytes, len(self._lines))
        left = {line: share for line, share in zip(self._lines, shared, strict=True) if share[1] > share[0]}
        while left:
            moved = False
            for line, (begin, end) in list(left.items()):
                got = self._landing.receive(grant, line, NOWHERE, head.offset + begin, end - begin)
                if got == AGAIN:
                    line.expect(end - begin)
                    continue
                moved = True
                left[line] = begin + got, end
                if begin + got == end:
                    del left[line]
            if left and not moved:
                self._wait(tuple(left))

    def _wait(self, lines: Sequence[Line]) -> None:
        """Until one of them has something to receive; meanwhile everything else is served."""
        pushed = self._serve()
        if self._cycle.state is not UP:
            raise EOFError
        self._drained = False
        self._poll(lines, pushed, None)

    def _poll(self, lines: Sequence[Line], pushed: Pushed, milliseconds: float | None) -> None:
        poller = self._quiet
        if pushed is CLOGGED or lines is not self._first:
            poller = self._poller(lines, self._out.clogged() if pushed is CLOGGED else ())
        for descriptor, _ in poller.poll(0 if pushed is Pushed.ENOUGH else milliseconds):
            if descriptor in self._bell.descriptors:
                self._bell.hush(descriptor)

    def _poller(self, lines: Sequence[Line], clogged: Sequence[int]) -> select.poll:
        asked = dict.fromkeys((*self._bell.descriptors, *(line.descriptor for line in lines)), select.POLLIN)
        for descriptor in clogged:
            asked[descriptor] = asked.get(descriptor, 0) | select.POLLOUT
        poller = select.poll()
        for descriptor, events in asked.items():
            poller.register(descriptor, events)
        return poller

    # --- callbacks ----------------------------------------------------------------------------------------------

    def _deliver_loan(self, number: TransferId, note: bytes, data: memoryview) -> None:
        self._cycle.count_received(data.nbytes, loan=True)
        self._events.on_lent(note, HeldLoan(data, lambda: self._release(number)))

    def _release(self, number: TransferId) -> None:
        """On any thread, perhaps long after the link has ended."""
        self._out.add_urgent(pack_release(number))
        self._send_here(self._out.try_push(INLINE_BYTES))

    def _on_release(self, number: TransferId) -> None:
        with self._lock:
            transfer = self._unsettled.get(number)
        if transfer is not None and not transfer.left:
            self._out.settle_pushing()  # the answer may be faster than the thread that has sent the question
        if transfer is None or not transfer.move.loan or not transfer.left:
            raise FrameError(f"transfer {number} is not a loan that can be released")
        self._settle(number)

    def _settle(self, number: TransferId) -> None:
        with self._lock:
            known = self._unsettled.pop(number, None)
        if known is not None:
            self._events.on_sent(number)

    def _fail(self, number: TransferId, reason: str) -> None:
        with self._lock:
            known = self._unsettled.pop(number, None)
        if known is not None:
            self._events.on_failed(number, reason)

    # --- the end ------------------------------------------------------------------------------------------------

    def _part(self, last: bytes) -> None:
        """Send the frame that is on its way, and ``last``; then wait until the peer has hung up, or give up.

        What the peer still sends is read and dropped: a socket that is closed with unread bytes resets the connection,
        and the peer would lose what it has not read yet."""
        self._landing.close()
        self._out.end(last)
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        deadline = time.monotonic() + FLUSH_SECONDS
        left, sending = list(self._lines), True
        while left and (seconds := deadline - time.monotonic()) > 0:
            pushed = self._out.push(INLINE_BYTES)
            if sending and pushed is ALL:
                sending = False
                for line in self._lines:
                    line.end_sending()
            left = [line for line in left if _drained(line, scratch)]
            if left:
                self._poll(left, pushed, seconds * 1000)

    def _finish(self, reason: str) -> None:
        """Settle everything and notify the owner, once."""
        lost = self._cycle.lose(reason)
        self._landing.close()
        self._out.end(None)
        self._out.settle_pushing()
        try:
            while self._done:
                self._settle(self._done.popleft())
            with self._lock:
                unsettled = list(self._unsettled)
            for number in unsettled:
                self._fail(number, self._cycle.reason)
            if lost:
                self._events.on_lost(link_down(reason))
        finally:
            self._out.close()
            for line in self._lines:
                line.close()
            self._bell.close()
            self._cycle.ended.set()


def _drained(line: Line, scratch: memoryview) -> bool:
    """Drop what has come; False if the peer has hung up."""
    line.expect(1)
    try:
        while line.receive(address_of(scratch), len(scratch)) != AGAIN:
            pass
    except (EOFError, OSError):
        return False
    return True
