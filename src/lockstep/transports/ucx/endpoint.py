"""One end of a ``grpc+ucx`` link.

The endpoint's thread reads the peer's frames; the driver's thread moves bytes. Callbacks come from either, one at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

from lockstep.protocol.core.ids import hex64
from lockstep.transports.base import EndpointEvents, Move, PeerAddress, TransferId
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants, RegionGrant
from lockstep.transports.landing import LOAN
from lockstep.transports.memory import HostRegion, check_move
from lockstep.transports.stream.frames import Header, pack, pack_fault, unpack
from lockstep.transports.stream.sending import Sender
from lockstep.transports.stream.stream_life import StreamLife
from lockstep.transports.timers import TimerThread
from lockstep.transports.ucx.agent import Agent, AgentError, Nixl
from lockstep.transports.ucx.driver import Driver, pause_after
from lockstep.transports.ucx.frames import MAX_METADATA_BYTES, UcxFrameKind

NAME: Final = "grpc+ucx"
_Place = tuple[int, bytes]
"""A region of the peer and the key that opens it."""


@dataclass(slots=True, eq=False)
class UcxTransfer:
    """One write or loan that has not been settled yet."""

    number: TransferId
    move: Move
    source: HostRegion
    addresses: dict[_Place, tuple[int, int | None]]
    """Where the peer's regions are, as far as it has announced them, and on which of its GPUs, if any."""
    cancelled: bool = False
    left: bool = False
    """All bytes are in the peer's memory."""

    @property
    def target(self) -> _Place:
        return self.move.target.region, self.move.target.key

    def is_ready(self) -> bool:
        return self.target in self.addresses

    def place(self) -> tuple[int, int, int, int]:
        move = self.move
        begin, _ = self.addresses[self.target]
        return move.target.region, begin + move.target_offset, self.source.address + move.offset, move.nbytes

    def devices(self) -> tuple[int | None, int | None]:
        return self.source.device, self.addresses[self.target][1]

    def header(self, kind: int, note_bytes: int = 0) -> Header:
        region, key = self.target
        return Header(
            kind=kind,
            flags=LOAN if self.move.loan else 0,
            note_bytes=note_bytes,
            transfer=self.number,
            region=region,
            key=key,
            offset=self.move.target_offset,
            total=self.move.nbytes,
        )


class UcxEndpoint(StreamLife[UcxTransfer]):
    """Writes ranges of regions into the memory of one incarnation of one peer."""

    name: ClassVar[str] = NAME
    pause = staticmethod(pause_after)
    """How long the driver waits before it polls again."""

    def __init__(
        self, peer: PeerAddress, grants: Grants, events: EndpointEvents, timers: TimerThread, nixl: Nixl, own_name: str
    ) -> None:
        super().__init__(peer, events, timers, Sender())
        self._grants = grants
        self._nixl = nixl
        self._agent_name = own_name
        self._driver: Driver | None = None
        self._driver_lock = threading.Lock()
        self._landing_ended = False
        self._addresses: dict[_Place, tuple[int, int | None]] = {}
        self._asked: set[_Place] = set()
        self._incoming: dict[TransferId, RegionGrant] = {}

    @property
    def transport(self) -> str:
        return self.name

    @property
    def lends_in_place(self) -> bool:
        return False

    def path(self) -> str:
        return f"NIXL (UCX) to {self.peer.address.decode(errors='replace')}"

    # --- sending --------------------------------------------------------------------------------------------------

    def start(self, move: Move) -> TransferId:
        """``urgency`` is ignored: UCX moves several transfers at the same time."""
        source = check_move(self.name, move)
        with self._lock:
            self._cycle.refuse_if_over()
            transfer = UcxTransfer(next(self._cycle.numbers), move, source, self._addresses)
            self._unsettled[transfer.number] = transfer
            driver = self._driver
            if driver is not None:
                self._hand_over(driver, transfer)
        return transfer.number

    def _hand_over(self, driver: Driver, transfer: UcxTransfer) -> None:
        """Under the lock, so that transfers reach the driver in the order of the calls."""
        if transfer.target not in self._asked:
            self._asked.add(transfer.target)
            self.sender.add_urgent(pack(transfer.header(UcxFrameKind.ASK)))
        source = transfer.source
        if source.nbytes:
            driver.do(lambda agent: agent.register(source.number, source.address, source.nbytes, source.device))
        self.sender.add_urgent(pack(transfer.header(UcxFrameKind.START)))
        driver.write(transfer)

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            known = self._unsettled.get(transfer)
            if known is None or known.cancelled or known.left:
                return
            known.cancelled = True
        self.sender.add_urgent(pack(known.header(UcxFrameKind.STOP)))
        if self._driver is not None:
            self._driver.nudge()
        self._timers.soon(lambda: self._fail(transfer, "cancelled"))

    def _on_written(self, transfer: UcxTransfer) -> None:
        """All bytes are in the peer's memory; on the driver's thread."""
        with self._lock:
            if transfer.cancelled or transfer.number not in self._unsettled:
                return
            transfer.left = True
        note = transfer.move.note
        self.sender.add_urgent(pack(transfer.header(UcxFrameKind.NOTE, len(note)), note))
        self._on_left(transfer)

    def _on_broken(self, reason: str) -> None:
        """NIXL has lost the peer; the stream may not have noticed yet."""
        self.sender.end(pack_fault(f"NIXL has lost the connection: {reason}"))
        self._timers.later(0.5, self._cut_if_open)

    def forget(self, region: int) -> None:
        """A region of this task is closed."""
        if self._driver is not None:
            self._driver.do(lambda agent: agent.forget(region))

    # --- the peer's frames, on the endpoint's thread --------------------------------------------------------------

    def _meet(self, incoming: Iterable[bytes]) -> None:
        """Exchange what the agents need to find each other."""
        try:
            agent = Agent(self._nixl, self._agent_name)
            self.sender.add_urgent(pack(Header(UcxFrameKind.AGENT), agent.connection()))
            header, payload = unpack(next(iter(incoming), b""))
            if header.kind != UcxFrameKind.AGENT or len(payload) > MAX_METADATA_BYTES:
                raise FrameError(f"a link of {self.name} must begin with the metadata of NIXL")
            agent.meet(bytes(payload))
            self._prove(agent, incoming)
        except AgentError as error:
            raise FrameError(str(error)) from error
        with self._driver_lock:
            if self._landing_ended:
                agent.close()
                return
            driver = Driver(f"ucx-{self.peer.task}", agent, self._on_written, self._on_broken, self.pause)
        with self._lock:
            self._driver = driver
            for transfer in self._unsettled.values():
                self._hand_over(driver, transfer)

    def _prove(self, agent: Agent, incoming: Iterable[bytes]) -> None:
        """Check that bytes arrive, before the link is up. Not needed here: UCX finds a path wherever gRPC does."""

    def _obey(self, header: Header, payload: memoryview) -> None:
        if header.kind == UcxFrameKind.NOTE:
            self._on_note(header, payload)
        elif header.kind == UcxFrameKind.START:
            self._on_start(header)
        elif header.kind == UcxFrameKind.STOP:
            if self._incoming.pop(header.transfer, None) is not None:
                self._drive().expect(-1)
        elif header.kind == UcxFrameKind.ASK:
            self._on_ask(header)
        elif header.kind == UcxFrameKind.REGION:
            self._on_region(header, payload)
        else:
            raise FrameError(f"a frame of kind {header.kind} does not belong here")

    def _drive(self) -> Driver:
        if self._driver is None:
            raise FrameError("a frame came before NIXL was ready")
        return self._driver

    def _granted(self, header: Header) -> RegionGrant:
        return self._grants.check(self.peer, header.region, header.key, header.offset, header.total)

    def _on_ask(self, header: Header) -> None:
        region = self._granted(header).region
        gpu = 0 if region.device is None else region.device + 1
        answer = Header(UcxFrameKind.REGION, region=header.region, key=header.key, offset=region.address, total=gpu)

        def tell(agent: Agent) -> None:
            if not region.nbytes:
                self.sender.add_urgent(pack(answer))
                return
            agent.register(region.number, region.address, region.nbytes, region.device)
            self.sender.add_urgent(pack(answer, agent.metadata_of(region.number)))

        self._drive().do(tell)

    def _on_region(self, header: Header, payload: memoryview) -> None:
        place = (header.region, header.key)
        if place not in self._asked or len(payload) > MAX_METADATA_BYTES:
            raise FrameError(f"region {header.region} was announced without a request")
        metadata, driver = bytes(payload), self._drive()

        def learn(agent: Agent) -> None:
            if metadata:
                agent.meet(metadata)
            self._addresses[place] = (header.offset, header.total - 1 if header.total else None)

        driver.do(learn)

    def _on_start(self, header: Header) -> None:
        grant = self._granted(header)
        grant.watch(self._stop_landing)
        self._incoming[header.transfer] = grant
        self._drive().expect(+1)

    def _on_note(self, header: Header, payload: memoryview) -> None:
        grant = self._incoming.pop(header.transfer, None)
        if grant is None or len(payload) != header.note_bytes:
            raise FrameError(f"transfer {header.transfer} arrived without an announcement")
        self._drive().expect(-1)
        self._granted(header)
        lent = grant.region.buffer[header.offset : header.offset + header.total] if header.flags & LOAN else None
        self._deliver(header.transfer, bytes(payload), header.total, lent)

    def _stop_landing(self) -> None:
        with self._driver_lock:
            self._landing_ended = True
            driver = self._driver
        if driver is not None:
            driver.stop()


def agent_name(task: str, incarnation: int, number: int) -> str:
    """A name that no other agent of any incarnation of any task has."""
    return f"{task}#{hex64(incarnation)}#{number}"
