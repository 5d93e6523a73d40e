"""The transport ``grpc`` of one task: regions in ordinary memory, links as streams of ``Task.Data``."""

from __future__ import annotations

import threading

from lockstep.protocol.core.messages import Ticket
from lockstep.security.key import Key
from lockstep.transports.base import EndpointEvents, PeerAddress, Region
from lockstep.transports.control.server import ControlServer
from lockstep.transports.grpc.endpoint import NAME, GrpcEndpoint
from lockstep.transports.regions import Regions
from lockstep.transports.stream.links import StreamLinks
from lockstep.transports.timers import TimerThread


class GrpcTransport:
    """Works wherever the tasks can reach one another's ports. ``server`` must not have been started yet."""

    def __init__(self, server: ControlServer, task: str, incarnation: int, key: Key | None) -> None:
        self._server = server
        self._timers = TimerThread(f"grpc-timers-{task}")
        self._regions = Regions(NAME)
        self._links: StreamLinks[GrpcEndpoint] = StreamLinks(server, "Data", task, incarnation, self._timers, key)

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._server.address.encode()

    def allocate(self, nbytes: int, purpose: str) -> Region:
        return self._regions.allocate(nbytes, purpose)

    def register(self, buffer: memoryview) -> Region:
        return self._regions.register(buffer)

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        return self._regions.grant(region, peer)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> GrpcEndpoint:
        endpoint = GrpcEndpoint(peer, self._regions.grants, events, self._timers)
        talk = self._links.open(endpoint, dials)
        thread = threading.Thread(target=endpoint.run, args=(talk,), name=f"grpc-data-{peer.task}", daemon=True)
        thread.start()
        return endpoint

    def close(self) -> None:
        self._links.close()
        self._regions.close()
        self._timers.close()
