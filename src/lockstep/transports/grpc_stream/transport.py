"""The transport ``grpc`` of one task: regions in ordinary memory, links as streams of ``Task.Data``."""

from __future__ import annotations

import threading
from itertools import count

from lockstep.protocol.messages import Ticket
from lockstep.transports.base import EndpointEvents, PeerAddress, Region, TransportError
from lockstep.transports.clerk import Clerk
from lockstep.transports.grants import Grants
from lockstep.transports.grpc_stream.endpoint import NAME, GrpcEndpoint
from lockstep.transports.grpc_stream.links import StreamLinks
from lockstep.transports.memory import HostRegion, allocate_memory, checked_buffer
from lockstep.transports.wire.server import ControlServer


class GrpcTransport:
    """Works everywhere where the tasks reach one another's ports. ``server`` must not have been started yet."""

    def __init__(self, server: ControlServer, task: str, incarnation: int) -> None:
        self._server = server
        self._clerk = Clerk(f"grpc-clerk-{task}")
        self._grants = Grants()
        self._region_numbers = count(1)
        self._regions: dict[int, HostRegion] = {}
        self._links: StreamLinks[GrpcEndpoint] = StreamLinks(server, "Data", task, incarnation, self._clerk)

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._server.address.encode()

    def allocate(self, nbytes: int, purpose: str) -> Region:
        memory = allocate_memory(nbytes, purpose)
        return self._add_region(
            HostRegion(next(self._region_numbers), memoryview(memory)[:nbytes], memory, self._forget)
        )

    def register(self, buffer: memoryview) -> Region:
        return self._add_region(HostRegion(next(self._region_numbers), checked_buffer(buffer), None, self._forget))

    def _add_region(self, region: HostRegion) -> HostRegion:
        self._regions[region.number] = region
        return region

    def _forget(self, number: int) -> None:
        self._grants.withdraw(number)
        self._regions.pop(number, None)

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        if not isinstance(region, HostRegion) or self._regions.get(region.number) is not region:
            raise TransportError("this region does not belong to this transport: use its allocate or register first")
        return self._grants.give(NAME, region, peer)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> GrpcEndpoint:
        endpoint = GrpcEndpoint(peer, self._grants, events, self._clerk)
        talk = self._links.open(endpoint, dials)
        thread = threading.Thread(target=endpoint.run, args=(talk,), name=f"grpc-data-{peer.task}", daemon=True)
        thread.start()
        return endpoint

    def close(self) -> None:
        self._links.close()
        for region in list(self._regions.values()):
            region.close()
        self._clerk.close()
