"""One end of a ``grpc`` data link, whichever side dialed.

Two threads serve it: gRPC's own thread pulls frames out of the ``Sender``, and the endpoint's thread reads the peer's
frames and lands them. Callbacks come from either, one at a time.
"""

from __future__ import annotations

from typing import Final

from lockstep.protocol.messages import Ticket
from lockstep.transports.base import EndpointEvents, LinkState, PeerAddress, Region, TransferId, TransportError
from lockstep.transports.clerk import Clerk
from lockstep.transports.grants import Grants
from lockstep.transports.grpc_stream.frames import FrameError, Header, Kind, pack
from lockstep.transports.grpc_stream.landing import Arrival, Landing
from lockstep.transports.grpc_stream.life import StreamLife
from lockstep.transports.grpc_stream.sending import Sender, Transfer
from lockstep.transports.loan import HeldLoan
from lockstep.transports.memory import HostRegion, check_transfer

NAME: Final = "grpc"


class GrpcEndpoint(StreamLife[Transfer]):
    """Moves ranges of regions to one life of one peer."""

    def __init__(self, peer: PeerAddress, grants: Grants, events: EndpointEvents, clerk: Clerk) -> None:
        super().__init__(peer, events, clerk, Sender(self._on_left))
        self._landing = Landing(grants, peer.task, peer.incarnation)

    def write(
        self,
        source: Region,
        offset: int,
        nbytes: int,
        target: Ticket,
        target_offset: int,
        note: bytes,
        urgency: int = 0,
    ) -> TransferId:
        return self._start(source, offset, nbytes, target, target_offset, note, urgency, loan=False)

    def lend(
        self,
        source: Region,
        offset: int,
        nbytes: int,
        target: Ticket,
        target_offset: int,
        note: bytes,
        urgency: int = 0,
    ) -> TransferId:
        return self._start(source, offset, nbytes, target, target_offset, note, urgency, loan=True)

    def _start(
        self,
        source: Region,
        offset: int,
        nbytes: int,
        target: Ticket,
        target_offset: int,
        note: bytes,
        urgency: int,
        *,
        loan: bool,
    ) -> TransferId:
        if not isinstance(source, HostRegion) or source.closed:
            raise TransportError("the source is no open region of this transport: use its allocate or register first")
        check_transfer(NAME, source, offset, nbytes, target, target_offset, note)
        data = source.buffer[offset : offset + nbytes]
        with self._lock:
            self._refuse_if_over()
            transfer = Transfer(next(self._numbers), data, target, target_offset, note, loan, urgency)
            self._unsettled[transfer.number] = transfer
            self.sender.add(transfer)
        return transfer.number

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            unsettled = self._unsettled.get(transfer)
        if unsettled is not None and self.sender.remove(unsettled):
            self._clerk.soon(lambda: self._fail(transfer, "cancelled"))

    @property
    def transport(self) -> str:
        return NAME

    @property
    def lends_in_place(self) -> bool:
        return False

    def bytes_under_way(self) -> int:
        with self._lock:
            sending = sum(t.begun for t in self._unsettled.values() if t.begun < t.data.nbytes)
        return sending + self._landing.bytes_landed()

    def path(self) -> str:
        return f"gRPC stream to {self.peer.address.decode(errors='replace')}"

    def _stop_landing(self) -> None:
        self._landing.close()

    def _obey(self, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.CHUNK:
            arrival = self._landing.take(header, payload)
            if arrival is not None:
                self._on_arrival(arrival)
        elif header.kind == Kind.RELEASE:
            self._on_release(header.transfer)
        else:
            raise FrameError(f"a frame of kind {header.kind} does not belong here")

    def _on_arrival(self, arrival: Arrival) -> None:
        with self._telling:
            if self._state is not LinkState.UP:
                return
            self._received[0] += arrival.data.nbytes
            self._received[2 if arrival.loan else 1] += 1
            if arrival.loan:
                frame = pack(Header(Kind.RELEASE, transfer=arrival.number))
                self._events.on_lent(arrival.note, HeldLoan(arrival.data, lambda: self.sender.add_urgent(frame)))
            else:
                self._events.on_arrived(arrival.note, arrival.data.nbytes)

    def _on_release(self, number: TransferId) -> None:
        with self._lock:
            transfer = self._unsettled.get(number)
        if transfer is None or not transfer.loan or transfer.begun < transfer.data.nbytes:
            raise FrameError(f"transfer {number} is no loan that could be released")
        self._settle(transfer)

    def _on_left(self, transfer: Transfer) -> None:
        """The last chunk was taken by gRPC; runs on the sender's thread."""
        self._sent[0] += transfer.data.nbytes
        self._sent[2 if transfer.loan else 1] += 1
        if not transfer.loan:
            self._settle(transfer)
