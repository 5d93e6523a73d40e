"""The interface of every transport, in words and types.

A *region* is memory registered with a transport. A *link* is one pair of tasks (one incarnation of each) over one
transport; each end holds an *endpoint* of it. An endpoint moves a range of a local region into a region that the peer
granted, and delivers a *note* (a few bytes with a meaning for the caller) at the other end **after** all bytes
are in place. The receiver's ``on_arrived``, never the sender's ``on_sent``, counts as arrival.

Rules that every transport keeps (``conformance/`` checks them):

* ``start`` never blocks for the network; it queues, and pushes back by queueing more, never by aborting.
* Callbacks come on the transport's own threads. They must not block; a transport may rely on that.
* Exactly one of ``on_sent`` and ``on_failed`` is called for each transfer, even after ``cancel`` and ``close``.
* A callback for a transfer may come before the call that started it has returned its number.
* Writes of one endpoint into the same bytes, with the same urgency, land in the order of the calls.
* Once ``close`` has returned on a link that is closed or lost, nothing of it lands in memory any more.
* After ``on_lost`` there are no further callbacks except pending ``on_failed`` ones. It is called at most once, and
  not at the end that called ``close``.
* ``close`` may be called twice, and from a callback. Once it has returned, there are no further callbacks except
  pending ``on_failed`` ones, and those only if a callback called it.
* Errors of the caller raise ``TransportError`` at the call, with the remedy in the text. A transfer on a link that is
  already lost or closed raises ``LinkDownError`` and gets no callback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.messages import Ticket

TransferId = int


class TransportError(Exception):
    """The caller asked for something this transport cannot do; the text says what to do instead."""


class LinkDownError(TransportError):
    """The link of this endpoint is lost or closed; the text says why."""


class NoPathError(TransportError):
    """This transport cannot link these two tasks, now or later; the text says why."""


class LinkState(StrEnum):
    """What an endpoint knows about its link."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """The peer of a link: task name, incarnation, and the bytes its transport published (``Transport.address``)."""

    task: str
    incarnation: int
    address: bytes


@dataclass(frozen=True, slots=True)
class Counters:
    """What has moved over one endpoint so far: complete transfers only, loans included in the bytes.

    When a link is idle, what one end sent is what the other received.
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
        """The bytes, writable, format ``B``; 64-byte aligned if ``allocate`` made them."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""

    def close(self) -> None:
        """Unregister and free. Call it only after every endpoint that may touch it is closed."""


class Loan(Protocol):
    """Bytes that arrived and can be read in place until ``release``; the lender does not overwrite them earlier."""

    @property
    def buffer(self) -> memoryview: ...

    def release(self) -> None: ...


class Move(NamedTuple):
    """A range of ``source`` that goes into the peer's region, and the note that follows it. ``nbytes`` may be 0."""

    source: Region
    offset: int
    nbytes: int
    target: Ticket
    target_offset: int
    note: bytes
    urgency: int = 0
    """When transfers wait for one another, more urgent ones that have not begun may go first."""
    loan: bool = False
    """The peer reads the bytes until it releases them; otherwise they are written into its region."""


class EndpointEvents(Protocol):
    """Callbacks of an endpoint to its owner."""

    def on_up(self) -> None:
        """Both ends are connected; writes flow."""

    def on_sent(self, transfer: TransferId) -> None:
        """The source bytes of this transfer may be overwritten (for a loan: the borrower has released it)."""

    def on_failed(self, transfer: TransferId, reason: str) -> None:
        """This transfer will not be delivered."""

    def on_arrived(self, note: bytes, nbytes: int) -> None:
        """All bytes of a write from the peer are in place."""

    def on_lent(self, note: bytes, loan: Loan) -> None:
        """A loan from the peer can be read; release it soon."""

    def on_word(self, word: bytes) -> None:
        """The peer has said this (``Speaks``)."""

    def on_lost(self, reason: Reason) -> None:
        """The link broke; ``reason`` is a plain phrase that includes what the system reported."""


class Endpoint(Protocol):
    """One end of a link."""

    @property
    def state(self) -> LinkState: ...

    def start(self, move: Move) -> TransferId:
        """Queue a move. A loan is read in place where memory is shared, else in the target after a copy."""

    def cancel(self, transfer: TransferId) -> None:
        """Do not deliver this transfer if it has not left yet; ``on_failed`` or ``on_sent`` follows."""

    def counters(self) -> Counters: ...

    @property
    def transport(self) -> str:
        """The transport in use, as in ``--server_protocol``."""

    @property
    def lends_in_place(self) -> bool:
        """Whether the peer reads a loan in the lender's memory: its target is unused, and ``loan_ticket`` is enough."""

    def path(self) -> str:
        """The path in use in a few words, for the line that each link prints."""

    def close(self) -> None: ...


def loan_ticket(transport: str, nbytes: int) -> Ticket:
    """A ticket for loans that are read in place: it does not name any memory."""
    return Ticket(transport, 0, nbytes, 0, b"")


@runtime_checkable
class MovesGpuMemory(Protocol):
    """A transport whose network device can access GPU memory directly (GPUDirect)."""

    @property
    def gpu_direct(self) -> bool:
        """Whether this is enabled; otherwise GPU memory is copied to and from regions on the host."""

    def register_gpu(self, address: int, nbytes: int, device: int) -> Region:
        """Memory of GPU number ``device``. Its region has no ``buffer``: only the device itself touches it."""


@runtime_checkable
class ShowsProgress(Protocol):
    """An endpoint that knows how much of its unfinished transfers has moved: this tells slow links from dead ones."""

    def bytes_under_way(self) -> int:
        """How many bytes of incomplete transfers have moved so far, in both directions."""


@runtime_checkable
class Speaks(Protocol):
    """An endpoint that carries short words beside its transfers, in order, for less than a control stream takes."""

    def say(self, word: bytes) -> bool:
        """Never blocks. False: not over this link, or not now; nothing was said."""


@runtime_checkable
class LandsOnce(Protocol):
    """An endpoint that can let what the peer writes land once, so that a transfer that is repeated does no harm."""

    def grant_once(self, region: Region) -> Ticket | None:
        """Let the peer of this link write into ``region``, each range once: what has landed whole does not land there
        again before the next call, and nothing of a ticket from before it does. Such writes arrive and are thrown away,
        without a callback. They cannot be loans. None: this endpoint cannot do that."""


class Transport(Protocol):
    """One transport of one task. It has no global state: one process may run two tasks."""

    @property
    def name(self) -> str:
        """As in ``--server_protocol``."""

    def address(self) -> bytes:
        """What a peer's ``connect`` needs to know, at most 64 KiB; sent in a control message."""

    def allocate(self, nbytes: int, purpose: str) -> Region:
        """Fresh zeroed registered memory. ``TransportError`` says how much is missing if there is too little."""

    def register(self, buffer: memoryview) -> Region:
        """Register memory that was allocated elsewhere; refuses memory that is not contiguous and writable."""

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        """Let this incarnation of this peer write into ``region``. Grants of its earlier incarnations there end."""

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> Endpoint:
        """Open this end of the link; exactly one end has ``dials`` set.

        Returns at once; ``on_up`` or ``on_lost`` follows. ``NoPathError`` if it is certain that this
        transport cannot link these two tasks.
        """

    def close(self) -> None: ...
