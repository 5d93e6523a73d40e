"""A transport under measurement: one end of one link, in either process."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, Final

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.messages import Ticket
from lockstep.security.key import Key
from lockstep.security.refusals import Entrance
from lockstep.transports.base import Endpoint, Loan, Move, PeerAddress, Region
from lockstep.transports.control.ports import PortRange
from lockstep.transports.control.server import ControlServer
from lockstep.transports.net.control import NetError
from lockstep.transports.registry import make_transport, plain_name

WAIT_SECONDS: Final = 60.0


def pack_ticket(ticket: Ticket) -> dict[str, Any]:
    return {
        "transport": ticket.transport,
        "region": ticket.region,
        "nbytes": ticket.nbytes,
        "address": ticket.address,
        "key": ticket.key.hex(),
    }


def unpack_ticket(packed: dict[str, Any]) -> Ticket:
    return Ticket(
        packed["transport"], packed["region"], packed["nbytes"], packed["address"], bytes.fromhex(packed["key"])
    )


class LinkEnd:
    """A transport with its server, one region and one link. Answers each arrival with an empty write."""

    def __init__(
        self,
        transport: str,
        host: str,
        task: str,
        incarnation: int,
        nbytes: int,
        key: Key | None,
        ports: PortRange | None = None,
    ) -> None:
        self._me = (task, incarnation)
        self._server = ControlServer(host, 0, threads=8, ports=ports, entrance=Entrance.NET)
        try:
            name, private = plain_name(transport)
            self._transport = make_transport(name, self._server, task, incarnation, key, private=private)
        except BaseException:
            self._server.stop(0)
            raise
        self._server.start()
        self.region: Region = self._transport.allocate(nbytes, "measuring")
        self.endpoint: Endpoint | None = None
        self._changed = threading.Condition()
        self._up = False
        self._lost = ""
        self._answers: SimpleQueue[float | None] = SimpleQueue()  # None: there will be no more
        self._lending = False
        self._answer_to: Ticket | None = None

    def address(self) -> PeerAddress:
        return PeerAddress(*self._me, self._transport.address())

    def grant(self, peer: PeerAddress) -> Ticket:
        return self._transport.grant(self.region, peer)

    def connect(self, peer: PeerAddress, *, dials: bool, answer_to: Ticket | None) -> None:
        """Open the link; with ``answer_to``, each arrival is answered there."""
        self._answer_to = answer_to
        self.endpoint = self._transport.connect(peer, dials, self)

    def wait_until_up(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._up or self._lost, WAIT_SECONDS):
                raise NetError("the link did not come up in time")
            self._raise_if_lost()

    def start(self, nbytes: int, target: Ticket, *, lend: bool) -> None:
        """Start a transfer from the beginning of the region. The peer answers a write; the release answers a loan."""
        assert self.endpoint is not None
        self._lending = lend
        self.endpoint.start(Move(self.region, 0, nbytes, target, 0, b"", loan=lend))

    def wait_answer(self) -> float:
        """When the next answer came."""
        try:
            answer = self._answers.get(timeout=WAIT_SECONDS)
        except Empty:
            raise NetError("a transfer was not answered in time") from None
        if answer is None:
            self._answers.put(None)
            raise NetError(f"the link broke: {self._lost}")
        return answer

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise NetError(f"the link broke: {self._lost}")

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        self._transport.close()
        self._server.stop(0)

    # --- events ---------------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        self._answers.put(time.perf_counter())

    def on_up(self) -> None:
        with self._changed:
            self._up = True
            self._changed.notify_all()

    def on_sent(self, transfer: int) -> None:  # noqa: ARG002 - only one kind is in progress at a time
        if self._lending:
            self._answered()

    def on_failed(self, transfer: int, reason: str) -> None:
        self._fail(f"transfer {transfer} failed: {reason}")

    def on_arrived(self, note: bytes, nbytes: int) -> None:  # noqa: ARG002 - the caller counts
        if self._answer_to is None:
            self._answered()
        elif self.endpoint is not None:
            self.endpoint.start(Move(self.region, 0, 0, self._answer_to, 0, b""))

    def on_lent(self, note: bytes, loan: Loan) -> None:  # noqa: ARG002 - the caller counts
        loan.release()

    def on_word(self, word: bytes) -> None:
        """Nobody says any here."""

    def on_lost(self, reason: Reason) -> None:
        self._fail(reason.text)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()
        self._answers.put(None)
