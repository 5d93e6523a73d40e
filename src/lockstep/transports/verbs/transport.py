"""The transport ``grpc+verbs`` of one task."""

from __future__ import annotations

from typing import ClassVar

from lockstep.security.key import Key
from lockstep.transports.base import EndpointEvents, PeerAddress, Region, TransportError
from lockstep.transports.control.server import ControlServer
from lockstep.transports.ucx.agent import Nixl, load_nixl
from lockstep.transports.ucx.transport import UcxTransport
from lockstep.transports.verbs.checks import gpudirect_problems, needs_system_verbs, usable_port
from lockstep.transports.verbs.devices import look_for_rdma
from lockstep.transports.verbs.endpoint import NAME, VerbsEndpoint
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions, ucx_settings
from lockstep.transports.verbs.provider import nixl_with_system_verbs


class VerbsTransport(UcxTransport):
    """Raises ``TransportError`` with everything that is wrong if this machine cannot do RDMA."""

    service: ClassVar[str] = "Verbs"

    def __init__(
        self, server: ControlServer, task: str, incarnation: int, key: Key | None, options: RdmaOptions = NO_OPTIONS
    ) -> None:
        self._port, nixl = _nixl_for(options)
        self.gpu_direct = options.gpudirect
        self._options = options
        super().__init__(server, task, incarnation, key, nixl)

    @classmethod
    def load_libraries(cls) -> None:
        _nixl_for(NO_OPTIONS)

    @property
    def name(self) -> str:
        return NAME

    def register_gpu(self, address: int, nbytes: int, device: int) -> Region:
        problems = list(gpudirect_problems(self._options))
        if problems:
            raise TransportError(" ".join(problems))
        return super().register_gpu(address, nbytes, device)

    def _make_endpoint(self, peer: PeerAddress, events: EndpointEvents, name: str) -> VerbsEndpoint:
        return VerbsEndpoint(peer, self._regions.grants, events, self._timers, self._nixl, name, self._port)


def _nixl_for(options: RdmaOptions) -> tuple[str, Nixl]:
    """The port that is used, and NIXL restricted to it."""
    rdma = look_for_rdma()
    port = usable_port(rdma, options)
    folder = nixl_with_system_verbs() if needs_system_verbs(rdma, port) else None
    return str(port), load_nixl(ucx_settings(options, port.device, port.port), folder)
