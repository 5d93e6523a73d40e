"""The interface of every transport, in words and types.

A *region* is memory registered with a transport. A *link* is one pair of tasks (in one pair of lives) over one
transport; each end holds an *endpoint* of it. An endpoint moves a range of a local region into a region that the peer
granted, and delivers a *note* (a few bytes that mean something to the caller) at the other end **after** all bytes
are in place. The receiver's ``on_arrived``, never the sender's ``on_sent``, counts as arrival.

Rules that every transport keeps (``conformance/`` checks them):

* ``write`` never blocks for the network; it queues, and pushes back by queueing more, never by aborting.
* Callbacks come on the transport's own threads. They must not block; a transport may rely on that.
* Exactly one of ``on_sent`` and ``on_failed`` is called for each transfer, also after ``cancel`` and ``close``.
* A callback for a transfer may come before the call that started it has returned its number.
* Writes of one endpoint into the same bytes, with the same urgency, land in the order of the calls.
* When a link is closed or lost, nothing of it lands in memory any more once ``close`` has returned.
* After ``on_lost`` no further callback but pending ``on_failed`` ones is made; it is made at most once, and not for
  one's own ``close``.
* ``close`` may be called twice, and from a callback. Once it has returned, no callback is made any more but pending
  ``on_failed`` ones, and those only where a callback called it.
* Errors of the caller raise ``TransportError`` at the call, with the remedy in the text. A transfer on a link that is
  lost or closed already raises ``LinkDownError`` and gets no callback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from lockstep.protocol.causes import Reason
from lockstep.protocol.messages import Ticket

TransferId = int


class TransportError(Exception):
    """The caller asked for something this transport cannot do; the text says what to do instead."""


class LinkDownError(TransportError):
    """The link of this endpoint is lost or closed; the text says why."""


class NoPathError(TransportError):
    """These two tasks cannot be linked by this transport, now or later; the text says why not."""


class LinkState(StrEnum):
    """What an endpoint knows of its link."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Whom to link with: its task name and life, and the bytes its transport published (``Transport.address``)."""

    task: str
    incarnation: int
    address: bytes


@dataclass(frozen=True, slots=True)
class Counters:
    """What moved over one endpoint so far: complete transfers only, and the bytes of loans among the bytes.

    Both ends of a quiet link agree, crosswise.
    """

    bytes_sent: int = 0
    writes_sent: int = 0
    bytes_received: int = 0
    writes_received: int = 0
    lends_sent: int = 0
    lends_received: int = 0


class Region(Protocol):
    """Contiguous memory that a transport can move; alive until ``close``."""

    @property
    def nbytes(self) -> int: ...

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable, format ``B``; 64-byte aligned where ``allocate`` made them."""

    @property
    def address(self) -> int:
        """Where the first byte lies in this process."""

    def close(self) -> None:
        """Unregister and free. Not before every endpoint that may touch it is closed."""


class Loan(Protocol):
    """Bytes that arrived and can be read in place until ``release``; the lender does not overwrite them before."""

    @property
    def buffer(self) -> memoryview: ...

    def release(self) -> None: ...


class EndpointEvents(Protocol):
    """What an endpoint tells its owner."""

    def on_up(self) -> None:
        """Both ends are connected; writes flow."""

    def on_sent(self, transfer: TransferId) -> None:
        """The source bytes of this transfer may be overwritten (for a loan: the borrower has released it)."""

    def on_failed(self, transfer: TransferId, reason: str) -> None:
        """This transfer will not be delivered."""

    def on_arrived(self, note: bytes, nbytes: int) -> None:
        """A write of the peer is completely in place."""

    def on_lent(self, note: bytes, loan: Loan) -> None:
        """A loan of the peer can be read; release it soon."""

    def on_lost(self, reason: Reason) -> None:
        """The link broke; ``reason`` is a plain phrase with what the system said."""


class Endpoint(Protocol):
    """One end of a link."""

    @property
    def state(self) -> LinkState: ...

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
        """Copy a range of ``source`` into the peer's region and then deliver ``note``. ``nbytes`` may be 0.

        ``urgency``: where transfers wait for one another, those of a higher one that have not begun may go first.
        """

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
        """Let the peer read a range of ``source``: in place where memory is shared, else in ``target`` after a copy."""

    def cancel(self, transfer: TransferId) -> None:
        """Do not deliver this transfer if it has not left yet; ``on_failed`` or ``on_sent`` tells which."""

    def counters(self) -> Counters: ...

    @property
    def transport(self) -> str:
        """The transport in use, as in ``--server_protocol``."""

    @property
    def lends_in_place(self) -> bool:
        """Whether the peer reads a loan in the lender's memory; its target is not touched: ``loan_ticket`` will do."""

    def path(self) -> str:
        """The path in use in a few words, for the line that each link prints."""

    def close(self) -> None: ...


def loan_ticket(transport: str, nbytes: int) -> Ticket:
    """A ticket for loans that are read in place: it leads to no memory at all."""
    return Ticket(transport, 0, nbytes, 0, b"")


@runtime_checkable
class MovesGpuMemory(Protocol):
    """A transport whose network device may read and write the memory of a GPU by itself (GPUDirect)."""

    @property
    def gpu_direct(self) -> bool:
        """Whether this was asked for; else the memory of GPUs is copied to and from regions on the host."""

    def register_gpu(self, address: int, nbytes: int, device: int) -> Region:
        """Memory of GPU number ``device``. Its region has no ``buffer``: only the device itself touches it."""


@runtime_checkable
class ShowsProgress(Protocol):
    """An endpoint that can tell how much of its unfinished transfers has moved: a slow link is told from a dead one."""

    def bytes_under_way(self) -> int:
        """Bytes of transfers that are not complete, in both directions, that have moved so far."""


class Transport(Protocol):
    """One transport of one task. Holds no global state: two tasks can live in one process."""

    @property
    def name(self) -> str:
        """As in ``--server_protocol``."""

    def address(self) -> bytes:
        """What a peer's ``connect`` needs to know, at most 64 KiB; sent in a control message."""

    def allocate(self, nbytes: int, purpose: str) -> Region:
        """Fresh zeroed registered memory. Too little room raises ``TransportError`` with numbers."""

    def register(self, buffer: memoryview) -> Region:
        """Register memory that somebody else allocated; refuses what is not contiguous and writable."""

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        """Let this life of this peer write into ``region``. What an earlier life of it was granted there ends."""

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> Endpoint:
        """Open this end of the link; exactly one end has ``dials`` set.

        Returns at once; ``on_up`` or ``on_lost`` follows. ``NoPathError`` where it is plain that these two
        tasks cannot be linked by this transport.
        """

    def close(self) -> None: ...
