"""One end of a ``grpc`` data link, whichever side dialed.

Two threads serve it: a thread of gRPC pulls frames out of the ``Sender``, and the endpoint's thread reads the peer's
frames and lands them. Callbacks come from either, one at a time.
"""

from __future__ import annotations

from typing import Final

from lockstep.transports.base import EndpointEvents, Move, PeerAddress, TransferId
from lockstep.transports.control.channels import PLAIN
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants
from lockstep.transports.grpc.chunks import CHUNK, ChunkedTransfer
from lockstep.transports.grpc.receiving import ChunkLanding
from lockstep.transports.memory import check_move
from lockstep.transports.stream.frames import Header
from lockstep.transports.stream.sending import Sender
from lockstep.transports.stream.stream_life import StreamLife
from lockstep.transports.timers import TimerThread

NAME: Final = "grpc"


class GrpcEndpoint(StreamLife[ChunkedTransfer]):
    """Moves ranges of regions to one incarnation of one peer."""

    def __init__(self, peer: PeerAddress, grants: Grants, events: EndpointEvents, timers: TimerThread) -> None:
        super().__init__(peer, events, timers, Sender(self._on_left))
        self._landing = ChunkLanding(grants, peer)

    def start(self, move: Move) -> TransferId:
        source = check_move(NAME, move)
        data = source.buffer[move.offset : move.offset + move.nbytes]
        with self._lock:
            self._cycle.refuse_if_over()
            transfer = ChunkedTransfer(next(self._cycle.numbers), move, data)
            self._unsettled[transfer.number] = transfer
            self.sender.add(transfer)
        return transfer.number

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            unsettled = self._unsettled.get(transfer)
        if unsettled is not None and self.sender.remove(unsettled):
            self._timers.soon(lambda: self._fail(transfer, "cancelled"))

    @property
    def transport(self) -> str:
        return NAME

    @property
    def lends_in_place(self) -> bool:
        return False

    def bytes_under_way(self) -> int:
        with self._lock:
            sending = sum(t.begun for t in self._unsettled.values() if not t.left)
        return sending + self._landing.bytes_landed()

    def path(self) -> str:
        return f"gRPC stream to {self.peer.address.decode(errors='replace').removeprefix(PLAIN)}"

    def _stop_landing(self) -> None:
        self._landing.close()

    def _obey(self, header: Header, payload: memoryview) -> None:
        if header.kind != CHUNK:
            raise FrameError(f"a frame of kind {header.kind} does not belong here")
        taken = self._landing.take(header, payload)
        if taken is not None:
            note, landed = taken
            self._deliver(landed.number, note, landed.total, landed.data if landed.loan else None)
