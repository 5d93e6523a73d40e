"""The transport ``grpc+shm`` of one task: regions that peers on this host map, and the door where they connect."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from lockstep.protocol.core.timing import CONNECT_SECONDS
from lockstep.security.key import Key
from lockstep.security.proof import ProofError
from lockstep.transports.base import EndpointEvents, NoPathError, PeerAddress, Region
from lockstep.transports.control.server import ControlServer
from lockstep.transports.frame_error import FrameError
from lockstep.transports.meeting import Meeting
from lockstep.transports.region_transport import RegionTransport
from lockstep.transports.shm.endpoint import NAME, Connected, ShmEndpoint
from lockstep.transports.shm.frames import pack_fault
from lockstep.transports.shm.handshake import (
    DoorKey,
    IncomingPeer,
    ThisEnd,
    door_key,
    greet,
    introduce,
    listen_to,
    welcome,
)
from lockstep.transports.shm.host import HostPlace, check_same_host, make_place, unpack_place
from lockstep.transports.shm.listener import SignalListener, connect
from lockstep.transports.shm.memory import SharedRegion
from lockstep.transports.shm.signal_socket import Signals
from lockstep.transports.shm.tokens import make_tokens


class ShmTransport(RegionTransport):
    """Works between tasks on one host. ``server`` only carries the control messages."""

    def __init__(
        self,
        server: ControlServer,  # noqa: ARG002 - as for all transports
        task: str,
        incarnation: int,
        key: Key | None,
    ) -> None:
        self._task = task
        self._incarnation = incarnation
        self._key = key
        self._place: HostPlace = make_place()
        super().__init__(NAME, self._forget)
        self._meeting: Meeting[ShmEndpoint, IncomingPeer] = Meeting(task, incarnation)
        self._door = SignalListener(self._place, task, self._identify, self._admit)

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._place.pack()

    def allocate(self, nbytes: int, purpose: str) -> Region:
        return self._regions.add(lambda number, on_close: SharedRegion(number, nbytes, purpose, on_close))

    def register(self, buffer: memoryview) -> Region:
        """Peers cannot map memory that was allocated elsewhere: it is sent by way of a copy."""
        return self._regions.register(buffer)

    def _stage(self, nbytes: int) -> SharedRegion:
        return SharedRegion(next(self._regions.numbers), nbytes, "a copy of registered memory", lambda _: None)

    def _forget(self, number: int) -> None:
        for endpoint in self._meeting.endpoints():
            endpoint.forget(number)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> ShmEndpoint:
        there = self._check(peer)
        descriptor, tokens = make_tokens()
        endpoint = ShmEndpoint(peer, self._regions.grants, events, tokens, self._stage)
        expected = self._meeting.add(endpoint, dials)

        def talk() -> str:
            with ExitStack() as kept:  # what only the handshake needs
                me = introduce(self._task, self._incarnation, descriptor, kept)
                try:
                    if dials:
                        connected = _dial(endpoint, there, me, door_key(there, self._key))
                        kept.close()
                        return endpoint.converse(connected)
                    with self._meeting.visit(expected) as visitor:
                        connected = _welcome(endpoint, visitor, me)
                        kept.close()
                        return endpoint.converse(connected)
                except (FrameError, ProofError) as fault:
                    return str(fault)

        self._serve(endpoint, talk, f"shm-{peer.task}")
        return endpoint

    def _check(self, peer: PeerAddress) -> HostPlace:
        try:
            there = unpack_place(peer.address)
        except (ValueError, TypeError) as error:
            raise NoPathError(f"{peer.task} did not publish an address for shared memory") from error
        check_same_host(peer.task, self._place, there)
        return there

    def close(self) -> None:
        if self._meeting.close():
            self._door.close()
        self._regions.close()

    def _identify(self, signals: Signals, spoke: Callable[[], None]) -> IncomingPeer:
        return listen_to(signals, self._task, self._incarnation, door_key(self._place, self._key), spoke)

    def _admit(self, visitor: IncomingPeer) -> None:
        """A visitor has proven itself: hand it to the endpoint that waits for it. On the visitor's thread."""
        self._meeting.match(visitor.task, visitor.incarnation, visitor.meant).visits.put(visitor)


# --- connecting, on the endpoint's thread -------------------------------------------------------------------------


def _dial(endpoint: ShmEndpoint, there: HostPlace, me: ThisEnd, key: DoorKey) -> Connected:
    signals = connect(there, endpoint.peer.task)
    endpoint.attach(signals.wake)
    try:
        return Connected(signals, greet(signals, me, endpoint.peer, key, time.monotonic() + CONNECT_SECONDS))
    except BaseException:
        signals.close()
        raise


def _welcome(endpoint: ShmEndpoint, visitor: IncomingPeer, me: ThisEnd) -> Connected:
    """The peer has connected: prove that memory is shared."""
    signals = visitor.signals
    endpoint.attach(signals.wake)
    try:
        return Connected(signals, welcome(visitor, me, time.monotonic() + CONNECT_SECONDS))
    except BaseException as fault:
        signals.send(pack_fault(str(fault) if isinstance(fault, FrameError) else ""))
        signals.close()
        raise
