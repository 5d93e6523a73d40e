"""The transport ``grpc`` of one task: regions in ordinary memory, links as streams of ``Task.Data``."""

from __future__ import annotations

from lockstep.security.key import Key
from lockstep.transports.base import EndpointEvents, PeerAddress
from lockstep.transports.control.server import ControlServer
from lockstep.transports.grpc.endpoint import NAME, GrpcEndpoint
from lockstep.transports.region_transport import RegionTransport
from lockstep.transports.stream.links import StreamLinks
from lockstep.transports.timers import TimerThread


class GrpcTransport(RegionTransport):
    """Works wherever the tasks can reach one another's ports. ``server`` must not have been started yet."""

    def __init__(
        self, server: ControlServer, task: str, incarnation: int, key: Key | None, *, private: bool = False
    ) -> None:
        """``private``: encrypt the tensors too."""
        self._timers = TimerThread(f"grpc-timers-{task}")
        super().__init__(NAME)
        self._links: StreamLinks[GrpcEndpoint] = StreamLinks(
            server, "Data", task, incarnation, self._timers, key, bulk=not private
        )

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._links.address.encode()

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> GrpcEndpoint:
        endpoint = GrpcEndpoint(peer, self._regions.grants, events, self._timers)
        self._serve(endpoint, self._links.open(endpoint, dials), f"grpc-data-{peer.task}")
        return endpoint

    def close(self) -> None:
        self._links.close()
        self._regions.close()
        self._timers.close()
