"""The transport ``grpc+ucx`` of one task: regions in ordinary memory, and one agent of NIXL per link."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

from lockstep.security.key import Key
from lockstep.transports.base import EndpointEvents, PeerAddress, Region
from lockstep.transports.control.server import ControlServer
from lockstep.transports.memory import GpuRegion
from lockstep.transports.region_transport import RegionTransport
from lockstep.transports.stream.links import StreamLinks
from lockstep.transports.timers import TimerThread
from lockstep.transports.ucx.agent import Nixl, load_nixl
from lockstep.transports.ucx.endpoint import NAME, UcxEndpoint, agent_name
from lockstep.transports.ucx.network import nixl_at


class UcxTransport(RegionTransport):
    """Works where UCX finds a network between the tasks. ``server`` must not have been started yet."""

    service: ClassVar[str] = "Ucx"
    """The name of its streams on the control server."""

    def __init__(
        self, server: ControlServer, task: str, incarnation: int, key: Key | None, nixl: Nixl | None = None
    ) -> None:
        self._nixl = nixl_at(server.listen_host, server.ports) if nixl is None else nixl
        self._server = server
        self._task = task
        self._incarnation = incarnation
        self._timers = TimerThread(f"ucx-timers-{task}")
        self._agents = count(1)
        super().__init__(self.name, self._forget)
        self._links: StreamLinks[UcxEndpoint] = StreamLinks(
            server, self.service, task, incarnation, self._timers, key, bulk=False
        )

    @classmethod
    def load_libraries(cls) -> None:
        """Import what the first transport of this kind in a process needs, which takes a while."""
        load_nixl()

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._server.address.encode()

    gpu_direct = False

    def register_gpu(self, address: int, nbytes: int, device: int) -> Region:
        return self._regions.add(lambda number, on_close: GpuRegion(number, address, nbytes, device, on_close))

    def _forget(self, number: int) -> None:
        for endpoint in self._links.endpoints():
            endpoint.forget(number)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> UcxEndpoint:
        endpoint = self._make_endpoint(peer, events, agent_name(self._task, self._incarnation, next(self._agents)))
        self._serve(endpoint, self._links.open(endpoint, dials), f"ucx-link-{peer.task}")
        return endpoint

    def _make_endpoint(self, peer: PeerAddress, events: EndpointEvents, name: str) -> UcxEndpoint:
        return UcxEndpoint(peer, self._regions.grants, events, self._timers, self._nixl, name)

    def close(self) -> None:
        self._links.close()
        self._regions.close()
        self._timers.close()
