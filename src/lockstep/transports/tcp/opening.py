"""Opening the connections of a link: dialing and accepting.

Both ends prove that they know the job's key (``security/proof.py``) on each connection before anything else is said on
it. What a connection is for is part of the proof: which incarnation is meant, which link, and which of its connections
this is. The first one must be expected here; the others belong to a link whose first one has been welcomed.

A task that was started with ``--require_private`` publishes an address that says so: its connections begin with TLS,
and the proof is inside of it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from lockstep.foreign import plain
from lockstep.protocol.core.timing import CONNECT_SECONDS, HELLO_SECONDS
from lockstep.security.certificates import certificates_for
from lockstep.security.key import Key, Purpose
from lockstep.security.listening import ProvenListener
from lockstep.security.proof import Parties, ProofError, Refusal
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.tls import PrivateEnds
from lockstep.security.wire import Claim, ProvenSocket, dial
from lockstep.transports import phrases
from lockstep.transports.base import PeerAddress
from lockstep.transports.control.addresses import Address, AddressError, parse_address, resolve
from lockstep.transports.control.ports import listen_at
from lockstep.transports.control.server import ControlServer
from lockstep.transports.frame_error import FrameError
from lockstep.transports.lifecycle import OPEN
from lockstep.transports.meeting import ExpectedVisitor, Meeting
from lockstep.transports.tcp.endpoint import PRIVATE, TcpEndpoint
from lockstep.transports.tcp.frames import MAX_LINES
from lockstep.transports.tcp.line import Line
from lockstep.transports.tcp.private_line import PrivateLine
from lockstep.version import __version__

_WORD: Final = "tensors"
_WELCOME: Final = b""
"""The first message after the proof; any other is why the visitor is not expected."""
_MAX_TEXT_BYTES: Final = 2048
_PAUSES: Final = (0.05, 0.1, 0.2, 0.4)
"""Seconds; together less than ``close`` waits for an endpoint's thread."""


class LinePurpose(NamedTuple):
    """What one connection is for."""

    meant: int
    """The incarnation of the acceptor."""
    link: int
    place: int
    """Which connection of the link; the first has the heads."""
    lines: int

    def pack(self) -> str:
        return f"{_WORD} {self.meant:x} {self.link:x} {self.place:x} {self.lines:x}"


def read_purpose(text: str) -> LinePurpose:
    """What ``pack`` packed; ``ProofError`` for anything else."""
    word, *numbers = text.split(" ")
    try:
        purpose = LinePurpose(*(int(number, 16) for number in numbers))
    except (TypeError, ValueError) as error:
        raise ProofError(Refusal.OTHER_TARGET) from error
    if word != _WORD or purpose.pack() != text or not 0 <= purpose.place < purpose.lines <= MAX_LINES:
        raise ProofError(Refusal.OTHER_TARGET)
    return purpose


def parties_of(purpose: LinePurpose, dialer: str, life: int, acceptor: str, address: str) -> Parties:
    """What both ends must agree on."""
    return Parties(
        purpose=purpose.pack(),
        dialer=dialer,
        acceptor=acceptor,
        version=__version__,
        dialer_life=life,
        acceptor_life=purpose.meant,
        acceptor_address=address,
    )


@dataclass(frozen=True, slots=True)
class LineVisit:
    """A connection of a dialer that has proven itself."""

    proven: ProvenSocket
    purpose: LinePurpose


_Place = tuple[str, int, int]


class LineLinks:
    """All links of one task, and the socket where their acceptors listen."""

    def __init__(
        self, server: ControlServer, task: str, incarnation: int, key: Key | None, lines: int, *, private: bool
    ) -> None:
        """``lines``: how many connections a link has that this task dials. ``private``: encrypt all of them."""
        self._task = task
        self._incarnation = incarnation
        self._key = None if key is None else key.sub(Purpose.DATA)
        self._count = lines
        self._meeting: Meeting[TcpEndpoint, LineVisit] = Meeting(task, incarnation)
        self._lock = threading.Lock()
        self._more: dict[_Place, SimpleQueue[LineVisit | None]] = {}
        self._certified = key
        self._private = self._ends() if private and key is not None else None
        listener = listen_at(server.listen_host, server.ports)
        address = str(Address(server.host, int(listener.getsockname()[1])))
        self.address = address if self._private is None else PRIVATE + address
        """What peers dial."""
        refused = REFUSALS.at(Entrance.TENSORS, address)
        self._door = ProvenListener(
            listener, self._key, self._believed, self._let_in, f"tcp-door-{task}", refused, self._private
        )

    def _ends(self) -> PrivateEnds:
        if self._certified is None:
            raise ProofError(Refusal.NO_KEY_HERE)
        return PrivateEnds(certificates_for(self._certified))

    def open(self, endpoint: TcpEndpoint, dials: bool) -> Callable[[], str]:
        """Take part in a link; returns what its thread runs: connect, move bytes, give the reason for the end."""
        expected = self._meeting.add(endpoint, dials)
        return lambda: self._dial(endpoint) if dials else self._accept(expected)

    def close(self) -> None:
        """End all links, and open no more."""
        if self._meeting.close():
            self._door.close()

    # --- the dialing end, on the endpoint's thread ---------------------------------------------------------------

    def _dial(self, endpoint: TcpEndpoint) -> str:
        peer, deadline = endpoint.peer, time.monotonic() + CONNECT_SECONDS
        link, published = secrets.randbits(64), peer.address.decode(errors="replace")
        address = published.removeprefix(PRIVATE)
        try:
            private = None if address == published else self._private or self._ends()
            if private is None and self._private is not None:
                return phrases.sends_in_the_clear(peer.task)
            with contextlib.ExitStack() as opened:
                lines = []
                for place in range(self._count):
                    purpose = LinePurpose(peer.incarnation, link, place, self._count)
                    proven = self._connect(endpoint, purpose, private, deadline, opened)
                    if place == 0:
                        _check_welcome(proven, deadline)
                    lines.append(_line_over(proven))
                opened.pop_all()
        except FrameError as fault:
            return str(fault)
        except ProofError as refusal:
            return f"{peer.task} at {address} is refused, or refuses: {refusal}"
        except OSError as error:
            return phrases.cannot_connect(address, str(error.strerror or error))
        return endpoint.converse(lines)

    def _connect(
        self,
        endpoint: TcpEndpoint,
        purpose: LinePurpose,
        private: PrivateEnds | None,
        deadline: float,
        opened: contextlib.ExitStack,
    ) -> ProvenSocket:
        """One connection; ``opened`` closes it. Where many tasks dial one at the same moment, it may hang up on a few
        to make room for others: those dial again."""
        for pause in _PAUSES:
            try:
                return self._connect_once(endpoint, purpose, private, deadline, opened)
            except ProofError as refusal:
                if refusal.refusal not in (Refusal.CROWDED, Refusal.CLOSED) or endpoint.state not in OPEN:
                    raise
            time.sleep(pause)
        return self._connect_once(endpoint, purpose, private, deadline, opened)

    def _connect_once(
        self,
        endpoint: TcpEndpoint,
        purpose: LinePurpose,
        private: PrivateEnds | None,
        deadline: float,
        opened: contextlib.ExitStack,
    ) -> ProvenSocket:
        peer = endpoint.peer
        where = peer.address.decode(errors="replace")
        parties = parties_of(purpose, self._task, self._incarnation, peer.task, where)
        with contextlib.ExitStack() as attempt:
            connection = attempt.enter_context(_reach(where.removeprefix(PRIVATE), endpoint.attach))
            soon = min(deadline, time.monotonic() + HELLO_SECONDS)
            shaken = connection if private is None else private.dial(connection, soon)
            proven = dial(shaken, self._key, parties, soon)
            opened.push(attempt.pop_all())
        return proven

    # --- the accepting end ---------------------------------------------------------------------------------------

    def _believed(self, claim: Claim) -> Parties:
        """Strangers do not learn which incarnation this is."""
        purpose = read_purpose(claim.purpose)
        if purpose.meant != self._incarnation:
            raise ProofError(Refusal.OTHER_TARGET)
        return parties_of(purpose, claim.dialer, claim.dialer_life, self._task, self.address)

    def _let_in(self, proven: ProvenSocket) -> None:
        """A visitor has proven itself: hand it to the endpoint that waits for it. On the visitor's thread."""
        claim = proven.claim
        assert claim is not None
        purpose = read_purpose(claim.purpose)
        if purpose.place:
            with self._lock:
                waiting = self._more.get((claim.dialer, claim.dialer_life, purpose.link))
            if waiting is None:
                proven.close()
            else:
                waiting.put(LineVisit(proven, purpose))
            return
        try:
            expected = self._meeting.match(claim.dialer, claim.dialer_life, purpose.meant)
        except FrameError as fault:
            with contextlib.suppress(ProofError):
                proven.send(str(fault).encode()[:_MAX_TEXT_BYTES], time.monotonic() + 1.0)
            proven.close()
            return
        expected.visits.put(LineVisit(proven, purpose))

    def _accept(self, expected: ExpectedVisitor[TcpEndpoint, LineVisit]) -> str:
        """Wait for the peer and move bytes with it; on the endpoint's thread."""
        endpoint = expected.endpoint
        try:
            with self._meeting.visit(expected) as visit:
                return endpoint.converse(self._welcome(endpoint, visit))
        except (FrameError, ProofError, OSError) as absence:
            return str(absence)

    def _welcome(self, endpoint: TcpEndpoint, visit: LineVisit) -> Sequence[Line]:
        """All connections of a link whose first one is here."""
        peer, deadline = endpoint.peer, time.monotonic() + HELLO_SECONDS
        place, came = (peer.task, peer.incarnation, visit.purpose.link), SimpleQueue[LineVisit | None]()
        with contextlib.ExitStack() as opened:
            opened.enter_context(visit.proven.socket)
            with self._lock:
                self._more[place] = came
            try:
                endpoint.attach(lambda: came.put(None))
                visit.proven.send(_WELCOME, deadline)
                others = [_next(came, peer, deadline, opened) for _ in range(visit.purpose.lines - 1)]
                in_order = sorted((visit, *others), key=lambda one: one.purpose.place)
                if any(one.purpose != visit.purpose._replace(place=at) for at, one in enumerate(in_order)):
                    raise FrameError(f"{peer.task} opened other connections than it had announced")
            finally:
                with self._lock:
                    del self._more[place]
            lines = [_line_over(one.proven) for one in in_order]
            opened.pop_all()
        return lines


def _line_over(proven: ProvenSocket) -> Line:
    return Line(proven.socket) if proven.private is None else PrivateLine(proven.private)


def _reach(where: str, attach: Callable[[Callable[[], object]], None]) -> socket.socket:
    """A connection to the first address that answers; ``OSError`` if none does. ``attach``: what interrupts it."""
    try:
        address = parse_address(where)
        numbers = resolve(address.host)
    except AddressError as error:
        raise FrameError(str(error)) from error
    failure: OSError | None = None
    for number in numbers:
        connection = socket.socket(socket.AF_INET6 if number.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        attach(lambda connection=connection: _cut(connection))  # type: ignore[misc]
        connection.settimeout(HELLO_SECONDS)
        try:
            connection.connect((str(number), address.port))
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    assert failure is not None
    raise failure


def _check_welcome(proven: ProvenSocket, deadline: float) -> None:
    answer = proven.receive(_MAX_TEXT_BYTES, deadline)
    if answer != _WELCOME:
        raise FrameError(plain(answer.decode(errors="replace")))


def _next(
    came: SimpleQueue[LineVisit | None], peer: PeerAddress, deadline: float, opened: contextlib.ExitStack
) -> LineVisit:
    visit = None
    with contextlib.suppress(Empty):
        visit = came.get(timeout=max(0.0, deadline - time.monotonic()))
    if visit is None:
        raise FrameError(f"{peer.task} did not open all connections within {HELLO_SECONDS:g} s")
    opened.enter_context(visit.proven.socket)
    return visit


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
