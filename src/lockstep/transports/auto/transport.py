"""The transport ``auto`` of one task: shared memory on one host, RDMA where both hosts have it, otherwise TCP."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from lockstep.protocol.core.messages import Ticket
from lockstep.security.key import Key
from lockstep.transports.auto.endpoint import AutoEndpoint, ManyRegion, Path
from lockstep.transports.auto.tickets import NAME, pack_addresses, pack_tickets, unpack_addresses
from lockstep.transports.base import (
    EndpointEvents,
    LinkState,
    NoPathError,
    PeerAddress,
    Region,
    Transport,
    TransportError,
)
from lockstep.transports.control.server import ControlServer
from lockstep.transports.grpc.transport import GrpcTransport
from lockstep.transports.registry import runs_here
from lockstep.transports.shm.transport import ShmTransport
from lockstep.transports.tcp.transport import TcpTransport
from lockstep.transports.timers import TimerThread
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions

VERBS: Final = "grpc+verbs"
_OPEN: Final = (LinkState.CONNECTING, LinkState.UP)


def paths_of(
    server: ControlServer,
    task: str,
    incarnation: int,
    key: Key | None,
    options: RdmaOptions = NO_OPTIONS,
    *,
    private: bool = False,
) -> list[Transport]:
    """The paths in the order in which a link tries them. The first one allocates the memory for all.

    ``private``: TCP encrypted, and without RDMA, which cannot be. gRPC comes last, and at the port of the links,
    encrypted: where that can be reached there is always a path, and it takes no port of its own.
    """
    shared = ShmTransport(server, task, incarnation, key)
    last = GrpcTransport(server, task, incarnation, key, private=True)
    lines = TcpTransport(server, task, incarnation, key, private=private)
    if private or not runs_here(VERBS, options):
        return [shared, lines, last]
    # Imported here, so that a machine without RDMA does not wait for NIXL.
    from lockstep.transports.verbs.transport import VerbsTransport

    return [shared, VerbsTransport(server, task, incarnation, key, options), lines, last]


class AutoTransport:
    """Several transports behind one. Memory is allocated once and registered with all of them."""

    def __init__(
        self,
        server: ControlServer,
        task: str,
        incarnation: int,
        key: Key | None,
        options: RdmaOptions = NO_OPTIONS,
        *,
        private: bool = False,
    ) -> None:
        self._paths: Sequence[Transport] = paths_of(server, task, incarnation, key, options, private=private)
        self._timers = TimerThread(f"auto-timers-{task}")
        self._lock = threading.Lock()
        self._regions: list[ManyRegion] = []
        self._endpoints: list[AutoEndpoint] = []
        self._closed = False

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return pack_addresses((path.name, path.address()) for path in self._paths)

    def allocate(self, nbytes: int, purpose: str) -> Region:
        first, *others = self._paths
        region = first.allocate(nbytes, purpose)
        parts = {first.name: region} | {path.name: path.register(region.buffer) for path in others}
        return self._add(ManyRegion(parts, region))

    def register(self, buffer: memoryview) -> Region:
        parts = {path.name: path.register(buffer) for path in self._paths}
        return self._add(ManyRegion(parts, next(iter(parts.values()))))

    def _add(self, region: ManyRegion) -> ManyRegion:
        with self._lock:
            self._regions = [one for one in self._regions if not one.closed]
            self._regions.append(region)
        return region

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        if not isinstance(region, ManyRegion) or region.closed or region not in self._regions:
            raise TransportError("this region does not belong to this transport: use its allocate or register first")
        return pack_tickets(region.nbytes, (path.grant(region.parts[path.name], peer) for path in self._paths))

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> AutoEndpoint:
        try:
            addresses = unpack_addresses(peer.address)
        except ValueError as error:
            raise NoPathError(f"{peer.task} published an address that cannot be read: {error}") from error
        paths = [Path(path, addresses.get(path.name)) for path in self._paths]
        endpoint = AutoEndpoint(peer, paths, events, self._timers.soon)
        with self._lock:
            if self._closed:
                raise TransportError("this transport is closed: make another one")
            self._endpoints = [one for one in self._endpoints if one.state in _OPEN]
            self._endpoints.append(endpoint)
        endpoint.begin(dials)
        return endpoint

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for endpoint in self._endpoints:
            endpoint.close()
        for region in self._regions:
            region.close()
        self._timers.close()
        for path in self._paths:
            path.close()
