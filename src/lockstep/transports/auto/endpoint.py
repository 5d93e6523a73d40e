"""One end of an ``auto`` link: it tries the paths, and then acts as the endpoint of the first that works.

The dialer tries one path after another. The acceptor is ready for all of them, and takes the one that the dialer
brings up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.protocol.core.causes import Reason, link_down
from lockstep.protocol.core.messages import Ticket
from lockstep.transports.auto.tickets import pack_tickets, ticket_for
from lockstep.transports.base import (
    Counters,
    Endpoint,
    EndpointEvents,
    LandsOnce,
    LinkDownError,
    LinkState,
    Move,
    PeerAddress,
    Region,
    ShowsProgress,
    Speaks,
    TransferId,
    Transport,
    TransportError,
)
from lockstep.transports.memory import SOURCE_NOT_OPEN

Later = Callable[[Callable[[], None]], object]


class ManyRegion:
    """Memory that is registered with every path."""

    def __init__(self, parts: Mapping[str, Region], first: Region) -> None:
        self.parts = parts
        self._first = first
        self.closed = False

    @property
    def nbytes(self) -> int:
        return self._first.nbytes

    @property
    def buffer(self) -> memoryview:
        return self._first.buffer

    @property
    def address(self) -> int:
        return self._first.address

    def close(self) -> None:
        self.closed = True
        for part in self.parts.values():
            if part is not self._first:
                part.close()
        self._first.close()


@dataclass(frozen=True, slots=True)
class Path:
    """One path to the peer, and the peer's address on it; None if the peer does not have this path."""

    transport: Transport
    address: bytes | None


class AutoEndpoint:
    """Moves ranges of regions by whichever path was found."""

    def __init__(self, peer: PeerAddress, paths: list[Path], events: EndpointEvents, later: Later) -> None:
        """``later`` runs something on another thread: endpoints of paths that were not taken are closed there."""
        self.peer = peer
        self._events = events
        self._later = later
        self._lock = threading.Lock()
        self._untried: Iterator[Path] = iter(paths)
        self._attempts: list[_Attempt] = []
        self._chosen: Endpoint | None = None
        self._grantor: LandsOnce | None = None
        self._speaker: Speaks | None = None
        self._name = ""
        self._over: LinkState | None = None
        self._reasons: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<AutoEndpoint to {self.peer.task} {self.state.value} by {self._name or 'no path yet'}>"

    # --- finding a path -----------------------------------------------------------------------------------------

    def begin(self, dials: bool) -> None:
        """Try the first path that is not obviously impossible; an acceptor tries all at once."""
        if dials:
            self._try_next()
            return
        for path in self._untried:
            self._try(path, dials=False)
        self._give_up_if_all_failed()

    def _try_next(self) -> None:
        for path in self._untried:
            if self._over is not None or self._try(path, dials=True):
                return
        self._give_up_if_all_failed()

    def _try(self, path: Path, dials: bool) -> bool:
        name = path.transport.name
        if path.address is None:
            self._reasons[name] = f"{self.peer.task} does not have it"
            return False
        attempt = _Attempt(self, name, dials)
        with self._lock:
            self._attempts.append(attempt)
        try:
            address = PeerAddress(self.peer.task, self.peer.incarnation, path.address)
            attempt.opened(path.transport.connect(address, dials, attempt))
        except TransportError as error:
            with self._lock:
                self._attempts.remove(attempt)
            self._reasons[name] = str(error)
            return False
        return True

    def take(self, attempt: _Attempt, endpoint: Endpoint) -> bool:
        """A path is up; whether it is the one in use from now on."""
        with self._lock:
            if self._chosen is not None or self._over is not None:
                return False
            self._chosen, self._name = endpoint, attempt.name
            self._grantor = endpoint if isinstance(endpoint, LandsOnce) else None
            self._speaker = endpoint if isinstance(endpoint, Speaks) else None
            others = [one for one in self._attempts if one is not attempt]
            self._attempts = [attempt]
        for other in others:
            self._later(other.close)
        self._events.on_up()
        return True

    def path_failed(self, attempt: _Attempt, reason: Reason) -> None:
        """A path broke: if none was up yet, the next one is tried; otherwise the link is lost."""
        with self._lock:
            if attempt not in self._attempts:
                return
            if self._chosen is not None:
                tell = self._over is None
                self._over = self._over or LinkState.LOST
            else:
                tell = False
                self._attempts.remove(attempt)
                self._reasons[attempt.name] = reason.text
        if self._chosen is not None:
            if tell:
                self._events.on_lost(reason)
        elif attempt.dials:
            self._try_next()
        else:
            self._give_up_if_all_failed()

    def _give_up_if_all_failed(self) -> None:
        with self._lock:
            if self._attempts or self._over is not None or self._chosen is not None:
                return
            self._over = LinkState.LOST
        why = "; ".join(f"{name}: {reason}" for name, reason in self._reasons.items()) or "no path"
        self._events.on_lost(link_down(why))

    # --- the endpoint -------------------------------------------------------------------------------------------

    @property
    def state(self) -> LinkState:
        if self._over is not None:
            return self._over
        return LinkState.CONNECTING if self._chosen is None else self._chosen.state

    @property
    def transport(self) -> str:
        return self._name or "auto"

    @property
    def lends_in_place(self) -> bool:
        return self._chosen is not None and self._chosen.lends_in_place

    def path(self) -> str:
        if self._chosen is None:
            return "no path yet"
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self._reasons.items() if name != self._name)
        return f"{self._chosen.path()} ({reasons})" if reasons else self._chosen.path()

    def start(self, move: Move) -> TransferId:
        if self._over is not None or self._chosen is None:
            raise LinkDownError(f"the link to {self.peer.task} is {self.state.value}: wait until it is up")
        source = move.source
        if not isinstance(source, ManyRegion) or source.closed:
            raise TransportError(SOURCE_NOT_OPEN)
        part, ticket = source.parts[self._name], ticket_for(self._name, move.target)
        # Written out: it is made for every tensor, and dataclasses.replace takes as long as half of the rest.
        chosen = Move(part, move.offset, move.nbytes, ticket, move.target_offset, move.note, move.urgency, move.loan)
        return self._chosen.start(chosen)

    def grant_once(self, region: Region) -> Ticket | None:
        if self._grantor is None or not isinstance(region, ManyRegion):
            return None
        ticket = self._grantor.grant_once(region.parts[self._name])
        return None if ticket is None else pack_tickets(region.nbytes, [ticket])

    def cancel(self, transfer: TransferId) -> None:
        if self._chosen is not None:
            self._chosen.cancel(transfer)

    def counters(self) -> Counters:
        return Counters() if self._chosen is None else self._chosen.counters()

    def bytes_under_way(self) -> int:
        return self._chosen.bytes_under_way() if isinstance(self._chosen, ShowsProgress) else 0

    def say(self, word: bytes) -> bool:
        return self._speaker is not None and self._over is None and self._speaker.say(word)

    def close(self) -> None:
        with self._lock:
            if self._over is None:
                self._over = LinkState.CLOSED
            attempts = list(self._attempts)
        for attempt in attempts:
            attempt.close()


class _Attempt:
    """The events of one path: its start and end go to the endpoint, its transfers straight to the owner."""

    def __init__(self, whole: AutoEndpoint, name: str, dials: bool) -> None:
        self.name = name
        self.dials = dials
        owner = whole._events
        self.on_sent, self.on_failed = owner.on_sent, owner.on_failed
        self.on_arrived, self.on_lent, self.on_word = owner.on_arrived, owner.on_lent, owner.on_word
        self._whole = whole
        self._ready = threading.Event()
        self._endpoint: Endpoint | None = None

    def opened(self, endpoint: Endpoint) -> None:
        """``connect`` has returned; callbacks may have come before."""
        self._endpoint = endpoint
        self._ready.set()

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()

    def on_up(self) -> None:
        self._ready.wait(5.0)  # until the thread that called connect has the endpoint in hand
        assert self._endpoint is not None
        self._whole.take(self, self._endpoint)

    def on_lost(self, reason: Reason) -> None:
        self._whole.path_failed(self, reason)
