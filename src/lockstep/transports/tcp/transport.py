"""The transport ``grpc+tcp`` of one task: regions in ordinary memory, links over TCP connections of their own."""

from __future__ import annotations

import threading
from typing import Final

from lockstep.protocol.core.messages import Ticket
from lockstep.security.key import Key
from lockstep.transports.base import EndpointEvents, NoPathError, PeerAddress, Region
from lockstep.transports.control.addresses import AddressError, parse_address
from lockstep.transports.control.server import ControlServer
from lockstep.transports.regions import Regions
from lockstep.transports.tcp.endpoint import NAME, TcpEndpoint
from lockstep.transports.tcp.opening import LineLinks

LINES: Final = 4
"""Connections of a link. The first does everything unless the network holds it up (``spreading.py``)."""


class TcpTransport:
    """Works wherever the tasks can reach one another's ports. ``server`` only says where to listen."""

    def __init__(self, server: ControlServer, task: str, incarnation: int, key: Key | None, lines: int = LINES) -> None:
        self._regions = Regions(NAME)
        self._links = LineLinks(server, task, incarnation, key, lines)

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> bytes:
        return self._links.address.encode()

    def allocate(self, nbytes: int, purpose: str) -> Region:
        return self._regions.allocate(nbytes, purpose)

    def register(self, buffer: memoryview) -> Region:
        return self._regions.register(buffer)

    def grant(self, region: Region, peer: PeerAddress) -> Ticket:
        return self._regions.grant(region, peer)

    def connect(self, peer: PeerAddress, dials: bool, events: EndpointEvents) -> TcpEndpoint:
        try:
            parse_address(peer.address.decode())
        except (AddressError, UnicodeDecodeError) as error:
            raise NoPathError(f"{peer.task} published an address that cannot be read: {error}") from error
        endpoint = TcpEndpoint(peer, self._regions.grants, events)
        talk = self._links.open(endpoint, dials)
        threading.Thread(target=endpoint.run, args=(talk,), name=f"tcp-{peer.task}", daemon=True).start()
        return endpoint

    def close(self) -> None:
        self._links.close()
        self._regions.close()
