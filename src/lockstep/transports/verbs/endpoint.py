"""One end of a ``grpc+verbs`` link: as ``grpc+ucx``, but up only once bytes have crossed by RDMA in both directions."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterable
from typing import ClassVar, Final

from lockstep.transports.base import EndpointEvents, PeerAddress
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants
from lockstep.transports.stream import frames as stream
from lockstep.transports.stream.frames import Header, pack, unpack
from lockstep.transports.stream.stream_life import CannotMeet
from lockstep.transports.timers import TimerThread
from lockstep.transports.ucx.agent import Agent, AgentError, Nixl
from lockstep.transports.ucx.driver import pause_beside_a_device
from lockstep.transports.ucx.endpoint import UcxEndpoint
from lockstep.transports.ucx.frames import MAX_METADATA_BYTES, UcxFrameKind
from lockstep.transports.verbs.probe_timer import LOOK_SECONDS, ProbeTimer, proves_that_there_is_no_path

NAME: Final = "grpc+verbs"

_PROBE: Final = b"lockstep"
_PROBE_REGION: Final = 0
"""The regions of a transport are numbered from 1."""
_HALF: Final = mmap.PAGESIZE


class VerbsEndpoint(UcxEndpoint):
    """Writes ranges of regions into the memory of one incarnation of one peer, by RDMA only."""

    name: ClassVar[str] = NAME
    pause = staticmethod(pause_beside_a_device)

    def __init__(
        self,
        peer: PeerAddress,
        grants: Grants,
        events: EndpointEvents,
        timers: TimerThread,
        nixl: Nixl,
        own_name: str,
        port: str,
    ) -> None:
        """``port``: the device and its port, as UCX names them."""
        super().__init__(peer, grants, events, timers, nixl, own_name)
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
            self.sender.add_urgent(pack(Header(UcxFrameKind.PROBE, offset=address), agent.metadata_of(_PROBE_REGION)))
            header, payload = unpack(next(iter(incoming), b""))
            if header.kind != UcxFrameKind.PROBE or len(payload) > MAX_METADATA_BYTES:
                raise FrameError(f"a link of {NAME} must begin with a probe")
            agent.meet(bytes(payload))
            self._exchange(agent, address, header.offset, memory, incoming)
            agent.forget(_PROBE_REGION)
        except AgentError as error:
            raise self._unreachable(str(error)) from error
        del view

    def _exchange(self, agent: Agent, address: int, remote: int, memory: mmap.mmap, incoming: Iterable[bytes]) -> None:
        """Return once bytes have crossed in both directions; ``CannotMeet`` says why they have not."""
        handle = agent.begin_write(address + _HALF, remote, len(_PROBE))
        looks = ProbeTimer(time.monotonic())
        sent = False
        while not (sent and memory[: len(_PROBE)] == _PROBE):
            if sent:
                agent.progress()
            else:
                sent = agent.is_done(handle)
            if looks.over(time.monotonic()):
                got = "arrived" if memory[: len(_PROBE)] == _PROBE else "did not arrive"
                was = "was acknowledged" if sent else "was not acknowledged"
                found = f"within {LOOK_SECONDS:g} s a write from here {was}, and one from there {got}"
                raise self._in_vain(looks.frozen, found, incoming)
            time.sleep(looks.pause)

    def _in_vain(self, frozen: float, found: str, incoming: Iterable[bytes]) -> CannotMeet:
        """Notify the peer, and learn whether it could look as well: an end that could not run has proven nothing."""
        self.sender.add_urgent(pack(Header(UcxFrameKind.IN_VAIN, total=round(frozen * 1000))))
        header, _ = unpack(next(iter(incoming), b""))
        if header.kind not in (UcxFrameKind.IN_VAIN, stream.FrameKind.FAULT):
            return CannotMeet(
                f"{found}, although both succeeded at {self.peer.task}"
            )  # the bytes arrived just too late
        theirs = header.total / 1000 if header.kind == UcxFrameKind.IN_VAIN else 0.0
        if proves_that_there_is_no_path(frozen, theirs):
            return self._unreachable(found)
        return CannotMeet(
            f"{found}; but {self.peer.task} could not run for {theirs:.1f} s of that, and this task for {frozen:.1f} s"
        )

    def _unreachable(self, found: str) -> CannotMeet:
        return CannotMeet(
            f"{self.port} here and {self.peer.task} ({self._peer_host()}) cannot reach each other by RDMA "
            f"although gRPC can: {found}; check that both devices are on one fabric (RoCE: UDP port 4791 open, the "
            "same RoCE version and network, --rdma_device and --rdma_gid_index), and compare with 'ib_write_bw' "
            "between the two hosts",
            no_path=True,
        )
