"""One task of the suite: a transport with its server, regions and links, driven by plain numbers.

Cases call the same methods whether the node is in this process (``LocalNode``) or in a separate one that can be killed
and frozen (``stage.RemoteVictim``).
"""

from __future__ import annotations

import random
import struct
import zlib
from typing import Final, Protocol

from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.messages import Ticket
from lockstep.security.key import Key
from lockstep.transports.base import Counters, Endpoint, Loan, Move, PeerAddress, Region
from lockstep.transports.conformance.events import EventLog, Heard
from lockstep.transports.control.server import ControlServer
from lockstep.transports.registry import make_transport, plain_name

_PLACE: Final = struct.Struct("<QQQ")
_BLOCK_BYTES: Final = 1_048_573
"""A prime, so that a chunk in the wrong place does not look like the right one."""


def note_for(region: int, offset: int, nbytes: int, tail: bytes = b"") -> bytes:
    """A note with the place of the bytes, so that the receiving node can check them in its callback."""
    return _PLACE.pack(region, offset, nbytes) + tail


class SuiteNode(Protocol):
    """What a case can do with a node."""

    task: str
    incarnation: int
    log: EventLog

    def address(self) -> PeerAddress: ...
    def allocate(self, nbytes: int) -> int: ...
    def fill(self, region: int, offset: int, nbytes: int, seed: int) -> None: ...
    def digest(self, region: int, offset: int, nbytes: int) -> int: ...
    def grant(self, region: int, peer: PeerAddress) -> Ticket: ...
    def connect(self, peer: PeerAddress, dials: bool) -> int: ...
    def start(
        self,
        link: int,
        region: int,
        offset: int,
        nbytes: int,
        target: Ticket,
        target_offset: int,
        note: bytes,
        loan: bool = False,
    ) -> int: ...
    def release(self, loan: int) -> None: ...
    def cancel(self, link: int, transfer: int) -> None: ...
    def state(self, link: int) -> str: ...
    def path(self, link: int) -> str: ...
    def counters(self, link: int) -> Counters: ...
    def close_link(self, link: int) -> None: ...
    def close_link_when(self, kind: str) -> None: ...
    def close(self) -> None: ...


class _Owner:
    """Implements EndpointEvents for one link of a node."""

    def __init__(self, node: LocalNode, link: int) -> None:
        self._node = node
        self._link = link

    def _tell(self, heard: Heard) -> None:
        if heard.kind == self._node.closing_kind:
            self._node.close_link(self._link)
        self._node.log.add(heard)

    def on_up(self) -> None:
        self._tell(Heard("up", self._link))

    def on_sent(self, transfer: int) -> None:
        self._tell(Heard("sent", self._link, transfer))

    def on_failed(self, transfer: int, reason: str) -> None:
        self._tell(Heard("failed", self._link, transfer, reason))

    def on_arrived(self, note: bytes, nbytes: int) -> None:
        region, offset, length = _PLACE.unpack_from(note)
        digest = self._node.digest(region, offset, length)
        self._tell(Heard("arrived", self._link, note=note, nbytes=nbytes, digest=digest))

    def on_lent(self, note: bytes, loan: Loan) -> None:
        self._node.loans.append(loan)
        digest = zlib.crc32(loan.buffer)
        self._tell(Heard("lent", self._link, note=note, nbytes=loan.buffer.nbytes, digest=digest))

    def on_word(self, word: bytes) -> None:
        self._tell(Heard("word", self._link, note=word))

    def on_lost(self, reason: Reason) -> None:
        self._tell(Heard("lost", self._link, text=reason.text))


class LocalNode:
    """A node in this process."""

    def __init__(
        self, transport: str, task: str, incarnation: int, host: str = "127.0.0.1", *, key: Key | None
    ) -> None:
        self.task = task
        self.incarnation = incarnation
        self.log = EventLog(task)
        self.loans: list[Loan] = []
        self.closing_kind = ""
        self.server = ControlServer(host, 0, threads=32)
        name, private = plain_name(transport)
        self.transport = make_transport(name, self.server, task, incarnation, key, private=private)
        self.server.start()
        self._regions: list[Region] = []
        self._endpoints: list[Endpoint] = []

    def address(self) -> PeerAddress:
        return PeerAddress(self.task, self.incarnation, self.transport.address())

    def allocate(self, nbytes: int) -> int:
        self._regions.append(self.transport.allocate(nbytes, "conformance"))
        return len(self._regions) - 1

    def region(self, number: int) -> Region:
        return self._regions[number]

    def fill(self, region: int, offset: int, nbytes: int, seed: int) -> None:
        block = random.Random(seed).randbytes(_BLOCK_BYTES)
        buffer = self._regions[region].buffer
        for begin in range(offset, offset + nbytes, _BLOCK_BYTES):
            end = min(begin + _BLOCK_BYTES, offset + nbytes)
            buffer[begin:end] = block[: end - begin]

    def digest(self, region: int, offset: int, nbytes: int) -> int:
        return zlib.crc32(self._regions[region].buffer[offset : offset + nbytes])

    def grant(self, region: int, peer: PeerAddress) -> Ticket:
        return self.transport.grant(self._regions[region], peer)

    def connect(self, peer: PeerAddress, dials: bool) -> int:
        link = len(self._endpoints)
        self._endpoints.append(self.transport.connect(peer, dials, _Owner(self, link)))
        return link

    def endpoint(self, link: int) -> Endpoint:
        return self._endpoints[link]

    def start(
        self,
        link: int,
        region: int,
        offset: int,
        nbytes: int,
        target: Ticket,
        target_offset: int,
        note: bytes,
        loan: bool = False,
    ) -> int:
        move = Move(self._regions[region], offset, nbytes, target, target_offset, note, loan=loan)
        return self._endpoints[link].start(move)

    def release(self, loan: int) -> None:
        self.loans[loan].release()

    def cancel(self, link: int, transfer: int) -> None:
        self._endpoints[link].cancel(transfer)

    def state(self, link: int) -> str:
        return self._endpoints[link].state.value

    def path(self, link: int) -> str:
        return self._endpoints[link].path()

    def counters(self, link: int) -> Counters:
        return self._endpoints[link].counters()

    def close_link(self, link: int) -> None:
        self._endpoints[link].close()

    def close_link_when(self, kind: str) -> None:
        """From now on, close a link from within its callback of this kind."""
        self.closing_kind = kind

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
        self.loans.clear()
        for region in self._regions:
            region.close()
        self.transport.close()
        self.server.stop(0)
