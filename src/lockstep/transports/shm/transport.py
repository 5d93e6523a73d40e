"""The transport ``grpc+shm`` of one task: regions that peers of this host map, and the door at which they knock."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Final

from lockstep.protocol.ids import hex64
from lockstep.protocol.messages import Ticket
from lockstep.protocol.timing import CONNECT_SECONDS, MATCH_SECONDS
from lockstep.transports.base import EndpointEvents, LinkState, NoPathError, PeerAddress, Region, TransportError
from lockstep.transports.grants import Grants
from lockstep.transports.memory import HostRegion, checked_buffer
from lockstep.transports.shm.door import Door, knock
from lockstep.transports.shm.endpoint import NAME, Connected, ShmEndpoint
from lockstep.transports.shm.frames import FrameError, pack_fault
from lockstep.transports.shm.handshake import Visitor, greet, introduce, refuse_life, welcome
from lockstep.transports.shm.host import Place, check_same_host, make_place, unpack_place
from lockstep.transports.shm.memory import SharedRegion
from lockstep.transports.shm.tokens import make_tokens
from lockstep.transports.wire.server import ControlServer

_OPEN: Final = (LinkState.CONNECTING, LinkState.UP)
_Life = tuple[str, int]


@dataclass(slots=True)
class _Expected:
    """An accepting endpoint, and the visitor it waits for (None: give up)."""

    endpoint: ShmEndpoint
    tokens: int
    visitors: SimpleQueue[Visitor | None] = field(default_factory=SimpleQueue)
    taken: bool = False


class ShmTransport:
    """Works between tasks of one host. ``server`` only carries the control messages."""

    def __init__(self, server: ControlServer, task: str, incarnation: int) -> None:  # noqa: ARG002 - as of all transports
        self._task = task
        self._incarnation = incarnation
        self._place: Place = make_place()
        self._grants = Grants()
        self._numbers = count(1)
        self._regions: dict[int, HostRegion] = {}
        self._arrivals = threading.Condition()
        self._expected: dict[_Life, _Expected] = {}
        self._endpoints: list[ShmEndpoint] = []
        self._closed = False
        self._door = Door(self._place, task, self._admit)

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._place.pack()

    def allocate(self, nbytes: int, purpose: str) -> Region:
        return self._add_region(SharedRegion(next(self._numbers), nbytes, purpose, self._forget))

    def register(self, buffer: memoryview) -> Region:
        """Memory of somebody else cannot be mapped by peers: it can be sent, by way of a copy, and not be granted."""
        return self._add_region(HostRegion(next(self._numbers), checked_buffer(buffer), None, self._forget))

    def _add_region(self, region: HostRegion) -> HostRegion:
        self._regions[region.number] = region
        return region

    def _stage(self, nbytes: int) -> SharedRegion:
        return SharedRegion(next(self._numbers), nbytes, "a copy of registered memory", lambda _: None)

    def _forget(self, number: int) -> None:
        self._grants.withdraw(number)
        self._regions.pop(number, None)
        for endpoint in list(self._endpoints):
            endpoint.forget(number)

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        if not isinstance(region, HostRegion) or self._regions.get(region.number) is not region:
            raise TransportError("this region does not belong to this transport: use its allocate or register first")
        return self._grants.give(NAME, region, peer)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> ShmEndpoint:
        there = self._check(peer)
        descriptor, tokens = make_tokens()
        endpoint = ShmEndpoint(peer, self._grants, events, tokens, self._stage)
        expected = _Expected(endpoint, descriptor)
        life = (peer.task, peer.incarnation)
        with self._arrivals:
            if self._closed:
                raise TransportError("this transport is closed: make another one")
            if not dials:
                self._expect(life, expected)
            self._endpoints = [e for e in self._endpoints if e.state in _OPEN]
            self._endpoints.append(endpoint)

        def connect(endpoint: ShmEndpoint) -> Connected | str:
            with ExitStack() as kept:
                try:
                    if dials:
                        return self._dial(endpoint, there, descriptor, kept)
                    return self._accept(life, expected, kept)
                except FrameError as fault:
                    return str(fault)

        name = f"shm-{peer.task}"
        threading.Thread(target=endpoint.run, args=(connect,), name=name, daemon=True).start()
        return endpoint

    def _check(self, peer: PeerAddress) -> Place:
        try:
            there = unpack_place(peer.address)
        except (ValueError, TypeError) as error:
            raise NoPathError(f"{peer.task} published no address for shared memory") from error
        check_same_host(peer.task, self._place, there)
        return there

    def _expect(self, life: _Life, expected: _Expected) -> None:
        before = self._expected.get(life)
        if before is not None and before.endpoint.state in _OPEN:
            raise TransportError(f"there is a link with this life of {life[0]} already: close it first")
        self._expected[life] = expected
        self._arrivals.notify_all()

    def close(self) -> None:
        with self._arrivals:
            if self._closed:
                return
            self._closed = True
            self._arrivals.notify_all()
        self._door.close()
        for endpoint in self._endpoints:
            endpoint.close()
        for region in list(self._regions.values()):
            region.close()

    # --- connecting, on the endpoint's thread --------------------------------------------------------------------

    def _dial(self, endpoint: ShmEndpoint, there: Place, tokens: int, kept: ExitStack) -> Connected:
        me = introduce(self._task, self._incarnation, tokens, kept)
        signals = knock(there, endpoint.peer.task)
        endpoint.attach(signals.wake)
        try:
            theirs = greet(signals, me, endpoint.peer, there.secret, time.monotonic() + CONNECT_SECONDS)
        except FrameError:
            signals.close()
            raise
        return Connected(signals, theirs)

    def _accept(self, life: _Life, expected: _Expected, kept: ExitStack) -> Connected:
        """Wait for the peer's visit and prove that memory is shared."""
        me = introduce(self._task, self._incarnation, expected.tokens, kept)
        expected.endpoint.attach(lambda: expected.visitors.put(None))
        try:
            visitor = expected.visitors.get(timeout=CONNECT_SECONDS)
        except Empty:
            visitor = None
        with self._arrivals:
            expected.taken = True
        if visitor is None:
            raise FrameError(f"{life[0]} did not connect within {CONNECT_SECONDS:g} s")
        expected.endpoint.attach(visitor.signals.wake)
        kept.callback(visitor.close_descriptors)
        try:
            theirs = welcome(visitor, me, time.monotonic() + CONNECT_SECONDS)
        except FrameError as fault:
            visitor.signals.send(pack_fault(str(fault)))
            visitor.signals.close()
            raise
        return Connected(visitor.signals, theirs)

    def _admit(self, visitor: Visitor) -> None:
        """A visitor said who it is: hand it to the endpoint that waits for it. On the visitor's thread."""
        if visitor.meant != self._incarnation or visitor.secret != self._place.secret:
            raise refuse_life(self._task, self._incarnation, visitor.meant)
        self._match(visitor).visitors.put(visitor)

    def _match(self, visitor: Visitor) -> _Expected:
        deadline = time.monotonic() + MATCH_SECONDS
        task, life = visitor.task, visitor.incarnation
        with self._arrivals:
            while not self._closed:
                expected = self._expected.get((task, life))
                if expected is not None and not expected.taken:
                    expected.taken = True
                    return expected
                if expected is not None and expected.endpoint.state in _OPEN:
                    raise FrameError(f"{self._task} has a link with this life of {task} already")
                if not self._arrivals.wait(max(0.0, deadline - time.monotonic())):
                    raise FrameError(f"{self._task} does not expect {task} in life {hex64(life)}")
        raise FrameError(f"{self._task} is closing")
