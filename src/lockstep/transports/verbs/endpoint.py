"""One end of a ``grpc+verbs`` link: as ``grpc+ucx``, but it is up only when bytes have crossed by RDMA both ways."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterable
from typing import ClassVar, Final

from lockstep.transports.base import NO_PATH, EndpointEvents, PeerAddress
from lockstep.transports.clerk import Clerk
from lockstep.transports.grants import Grants
from lockstep.transports.grpc_stream.frames import FrameError, Header, pack, unpack
from lockstep.transports.grpc_stream.life import CannotMeet
from lockstep.transports.ucx.agent import Agent, AgentError, Nixl
from lockstep.transports.ucx.endpoint import UcxEndpoint
from lockstep.transports.ucx.frames import MAX_METADATA_BYTES, Kind

NAME: Final = "grpc+verbs"

PROBE_SECONDS: Final = 8.0
"""How long the first bytes may take. RDMA itself may try for ever, and says nothing meanwhile."""

_PROBE: Final = b"lockstep"
_PROBE_REGION: Final = 0
"""The regions of a transport are numbered from 1."""
_HALF: Final = mmap.PAGESIZE
_PAUSES: Final = (0.001, 0.05)
"""Seconds between two looks at the probe: the first ones, and at most. Bytes arrive at once or, mostly, much later: the
peer still imports torch, and so may this task, which needs its processor for that."""


class VerbsEndpoint(UcxEndpoint):
    """Writes ranges of regions into the memory of one life of one peer, by RDMA and by nothing else."""

    name: ClassVar[str] = NAME

    def __init__(
        self,
        peer: PeerAddress,
        grants: Grants,
        events: EndpointEvents,
        clerk: Clerk,
        nixl: Nixl,
        own_name: str,
        port: str,
    ) -> None:
        """``port``: the device and its port, as UCX names them."""
        super().__init__(peer, grants, events, clerk, nixl, own_name)
        self.port = port

    def path(self) -> str:
        return f"RDMA (verbs, reliable connection) by {self.port} to {self._peer_host()}"

    def _peer_host(self) -> str:
        return self.peer.address.decode(errors="replace").rpartition(":")[0].strip("[]")

    def _prove(self, agent: Agent, incoming: Iterable[bytes]) -> None:
        """Each end writes a few bytes into the other's memory, and waits for those of the other."""
        memory = mmap.mmap(-1, 2 * _HALF)
        memory[_HALF : _HALF + len(_PROBE)] = _PROBE
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(view)
        try:
            agent.register(_PROBE_REGION, address, len(memory))
            self.sender.add_urgent(pack(Header(Kind.PROBE, offset=address), agent.metadata_of(_PROBE_REGION)))
            header, payload = unpack(next(iter(incoming), b""))
            if header.kind != Kind.PROBE or len(payload) > MAX_METADATA_BYTES:
                raise FrameError(f"a link of {NAME} begins with a probe")
            agent.meet(bytes(payload))
            self._exchange(agent, address, header.offset, memory)
            agent.forget(_PROBE_REGION)
        except AgentError as error:
            raise CannotMeet(self._unreachable(str(error))) from error
        del view

    def _exchange(self, agent: Agent, address: int, remote: int, memory: mmap.mmap) -> None:
        handle = agent.begin_write(address + _HALF, remote, len(_PROBE))
        began = time.monotonic()
        sent = False
        while not (sent and memory[: len(_PROBE)] == _PROBE):
            if sent:
                agent.progress()
            else:
                sent = agent.is_done(handle)
            waited = time.monotonic() - began
            if waited > PROBE_SECONDS:
                got = "arrived" if memory[: len(_PROBE)] == _PROBE else "did not arrive"
                was = "was acknowledged" if sent else "was not acknowledged"
                raise CannotMeet(
                    self._unreachable(f"within {PROBE_SECONDS:g} s a write from here {was}, and one from there {got}")
                )
            time.sleep(min(max(_PAUSES[0], waited / 20), _PAUSES[1]))

    def _unreachable(self, found: str) -> str:
        return (
            f"{NO_PATH} {self.port} here and {self.peer.task} ({self._peer_host()}) do not reach each other by RDMA "
            f"although gRPC does: {found}; see that both devices are on one fabric (RoCE: UDP port 4791 open, the same "
            "RoCE version and network, --rdma_device and --rdma_gid_index), and compare with 'ib_write_bw' between the "
            "two hosts"
        )
