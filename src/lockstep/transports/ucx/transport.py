"""The transport ``grpc+ucx`` of one task: regions in ordinary memory, and an agent of NIXL for each link."""

from __future__ import annotations

import threading
from itertools import count
from typing import ClassVar

from lockstep.protocol.messages import Ticket
from lockstep.transports.base import EndpointEvents, PeerAddress, Region, TransportError
from lockstep.transports.clerk import Clerk
from lockstep.transports.grants import Grants
from lockstep.transports.grpc_stream.links import StreamLinks
from lockstep.transports.memory import GpuRegion, HostRegion, allocate_memory, checked_buffer
from lockstep.transports.ucx.agent import Nixl, load_nixl
from lockstep.transports.ucx.endpoint import NAME, UcxEndpoint, agent_name
from lockstep.transports.wire.server import ControlServer


class UcxTransport:
    """Works where UCX finds a network between the tasks. ``server`` must not have been started yet."""

    service: ClassVar[str] = "Ucx"
    """The name of its streams on the control server."""

    def __init__(self, server: ControlServer, task: str, incarnation: int, nixl: Nixl | None = None) -> None:
        self._nixl = load_nixl() if nixl is None else nixl
        self._server = server
        self._task = task
        self._incarnation = incarnation
        self._clerk = Clerk(f"ucx-clerk-{task}")
        self._grants = Grants()
        self._numbers = count(1)
        self._agents = count(1)
        self._regions: dict[int, HostRegion] = {}
        self._links: StreamLinks[UcxEndpoint] = StreamLinks(server, self.service, task, incarnation, self._clerk)

    @classmethod
    def load_libraries(cls) -> None:
        """What the first of its kind in a process imports, which takes a while."""
        load_nixl()

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._server.address.encode()

    def allocate(self, nbytes: int, purpose: str) -> Region:
        memory = allocate_memory(nbytes, purpose)
        return self._add_region(HostRegion(next(self._numbers), memoryview(memory)[:nbytes], memory, self._forget))

    def register(self, buffer: memoryview) -> Region:
        return self._add_region(HostRegion(next(self._numbers), checked_buffer(buffer), None, self._forget))

    gpu_direct = False

    def register_gpu(self, address: int, nbytes: int, device: int) -> Region:
        return self._add_region(GpuRegion(next(self._numbers), address, nbytes, device, self._forget))

    def _add_region(self, region: HostRegion) -> HostRegion:
        self._regions[region.number] = region
        return region

    def _forget(self, number: int) -> None:
        self._grants.withdraw(number)
        self._regions.pop(number, None)
        for endpoint in self._links.endpoints():
            endpoint.forget(number)

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        if not isinstance(region, HostRegion) or self._regions.get(region.number) is not region:
            raise TransportError("this region does not belong to this transport: use its allocate or register first")
        return self._grants.give(self.name, region, peer)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> UcxEndpoint:
        endpoint = self._make_endpoint(peer, events, agent_name(self._task, self._incarnation, next(self._agents)))
        talk = self._links.open(endpoint, dials)
        threading.Thread(target=endpoint.run, args=(talk,), name=f"ucx-link-{peer.task}", daemon=True).start()
        return endpoint

    def _make_endpoint(self, peer: PeerAddress, events: EndpointEvents, name: str) -> UcxEndpoint:
        return UcxEndpoint(peer, self._grants, events, self._clerk, self._nixl, name)

    def close(self) -> None:
        self._links.close()
        for region in list(self._regions.values()):
            region.close()
        self._clerk.close()
