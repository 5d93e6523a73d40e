"""The transport ``grpc+tcp`` of one task: regions in ordinary memory, links over TCP connections of their own."""

from __future__ import annotations

from typing import Final

from lockstep.security.key import Key
from lockstep.transports.base import EndpointEvents, NoPathError, PeerAddress
from lockstep.transports.control.addresses import AddressError, parse_address
from lockstep.transports.control.server import ControlServer
from lockstep.transports.region_transport import RegionTransport
from lockstep.transports.tcp.endpoint import NAME, PRIVATE, TcpEndpoint
from lockstep.transports.tcp.opening import LineLinks

LINES: Final = 4
"""Connections of a link. The first does everything unless the network holds it up (``spreading.py``)."""


class TcpTransport(RegionTransport):
    """Works wherever the tasks can reach one another's ports. ``server`` only says where to listen."""

    def __init__(
        self,
        server: ControlServer,
        task: str,
        incarnation: int,
        key: Key | None,
        lines: int = LINES,
        *,
        private: bool = False,
    ) -> None:
        """``private``: encrypt the tensors."""
        super().__init__(NAME)
        self._links = LineLinks(server, task, incarnation, key, lines, private=private)

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._links.address.encode()

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> TcpEndpoint:
        try:
            parse_address(peer.address.decode().removeprefix(PRIVATE))
        except (AddressError, UnicodeDecodeError) as error:
            raise NoPathError(f"{peer.task} published an address that cannot be read: {error}") from error
        endpoint = TcpEndpoint(peer, self._regions.grants, events)
        self._serve(endpoint, self._links.open(endpoint, dials), f"tcp-{peer.task}")
        return endpoint

    def close(self) -> None:
        self._links.close()
        self._regions.close()
