"""The active side: everything that can move bytes to the peer, behind one small interface.

``start`` begins a transfer, ``finish`` waits for the answer to the oldest one. The limits are written the way
you would write them without Lockstep: a memory copy, a TCP socket, a stream of grpcio, a write of NIXL.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, Final, Protocol

from lockstep.security.proof import INSECURE, Dialer, ProofError
from lockstep.transports.base import PeerAddress
from lockstep.transports.control.channels import open_data_channel
from lockstep.transports.control.server import method_path
from lockstep.transports.grpc.chunks import CHUNK_BYTES
from lockstep.transports.net.control import (
    BARE_GRPC,
    CALL_SECONDS,
    TCP,
    Caller,
    NetError,
    connect_proven,
    net_key,
    net_parties,
)
from lockstep.transports.net.links import LinkEnd, pack_ticket, unpack_ticket
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.registry import encrypted
from lockstep.transports.ucx.agent import Agent
from lockstep.transports.ucx.network import nixl_at

COPY, BARE_NIXL = "memory copy", "bare NIXL"
SHM, SHM_LEND, GRPC, UCX, VERBS = "grpc+shm", "grpc+shm lend", "grpc", "grpc+ucx", "grpc+verbs"
LINKED_TCP: Final = "grpc+tcp"
ENCRYPTED: Final = (encrypted(GRPC), encrypted(LINKED_TCP))
LIMITS: Final = (
    *((GRPC, BARE_GRPC), (encrypted(GRPC), GRPC), (UCX, BARE_NIXL), (SHM, COPY)),
    *((encrypted(LINKED_TCP), LINKED_TCP), (LINKED_TCP, TCP), (GRPC, TCP), (UCX, TCP)),
)
"""Each path and what it is compared with."""


class Contender(Protocol):
    """Something that moves bytes to the peer."""

    name: str

    def start(self, nbytes: int) -> None: ...

    def finish(self) -> float:
        """When the oldest transfer was answered."""

    def begin(self) -> None:
        """A burst of this contender begins."""

    def end(self) -> None: ...

    def close(self) -> None: ...


def filled(nbytes: int) -> bytearray:
    """Resident memory: pages that were never written would all be read from the same zero page."""
    return bytearray(b"\1") * nbytes


class MemoryCopy:
    """The least that a transfer costs if it does not leave the bytes where they are."""

    name = COPY

    def __init__(self, nbytes: int) -> None:
        self._memory = filled(nbytes), filled(nbytes)
        self._places = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._memory]
        self._ended = 0.0

    def start(self, nbytes: int) -> None:
        ctypes.memmove(self._places[1], self._places[0], nbytes)
        self._ended = time.perf_counter()

    def finish(self) -> float:
        return self._ended

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


class TcpSocket:
    """A bare socket with TCP_NODELAY; sends from memory and is answered by one byte."""

    name = TCP

    def __init__(self, caller: Caller, nbytes: int) -> None:
        self._memory = memoryview(filled(nbytes))
        port = caller.call("tcp", nbytes=nbytes)
        self._socket = connect_proven(caller.remote_host, port, TCP, caller.key).socket
        self._socket.settimeout(CALL_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, nbytes: int) -> None:
        self._socket.sendall(struct.pack("<Q", nbytes))
        self._socket.sendall(self._memory[:nbytes])

    def finish(self) -> float:
        if not self._socket.recv(1):
            raise NetError("the bare socket was closed")
        return time.perf_counter()

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None:
        self._socket.close()


class BareGrpc:
    """A bare bidirectional stream with our channel settings: a copy out of memory, chunks of 1 MiB, a copy in."""

    name = BARE_GRPC

    def __init__(self, caller: Caller, nbytes: int) -> None:
        self._memory = memoryview(filled(nbytes))
        self._sizes: SimpleQueue[int | None] = SimpleQueue()
        self._channel = open_data_channel(caller.call("bare_grpc", nbytes=nbytes))
        key = net_key(caller.key)
        dialer = None if key is None else Dialer(key, net_parties(BARE_GRPC))
        self._proofs: SimpleQueue[bytes] = SimpleQueue()
        self._proofs.put(INSECURE if dialer is None else dialer.nonce)
        self._answers = self._channel.stream_stream(method_path("Net", "Bare"))(self._messages(dialer is not None))
        if dialer is not None:
            self._prove(dialer)

    def _prove(self, dialer: Dialer) -> None:
        try:
            self._proofs.put(dialer.answer(next(self._answers))[0])
        except (ProofError, StopIteration, grpc.RpcError) as error:
            self._proofs.put(b"")
            self.close()
            raise NetError(f"the bare stream did not open: {error}") from error

    def _messages(self, proves: bool) -> Iterator[bytes]:
        for _ in range(2 if proves else 1):
            yield self._proofs.get()
        while (nbytes := self._sizes.get()) is not None:
            for at in range(0, nbytes, CHUNK_BYTES):
                end = min(at + CHUNK_BYTES, nbytes)
                yield b"".join((b"\1" if end == nbytes else b"\0", self._memory[at:end]))

    def start(self, nbytes: int) -> None:
        self._sizes.put(nbytes)

    def finish(self) -> float:
        next(self._answers)
        return time.perf_counter()

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None:
        self._sizes.put(None)
        self._answers.cancel()
        self._channel.close()


class BareNixl:
    """A bare agent on the same UCX transports: a write is answered when NIXL reports that it is done."""

    name = BARE_NIXL

    def __init__(self, caller: Caller, nbytes: int) -> None:
        self._caller = caller
        self._memory = filled(nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._agent = Agent(nixl_at(caller.local_host, caller.ports), f"net-here-{secrets.token_hex(8)}")
        self._agent.register(1, self._address, nbytes)
        there = caller.call("bare_nixl", nbytes=nbytes)
        self._agent.meet(bytes.fromhex(there["metadata"]))
        self._there = int(there["address"])
        self._handles: deque[Any] = deque()

    def begin(self) -> None:
        self._caller.call("poll", on=True)

    def end(self) -> None:
        self._caller.call("poll", on=False)

    def start(self, nbytes: int) -> None:
        self._handles.append(self._agent.begin_write(self._address, self._there, nbytes))

    def finish(self) -> float:
        handle = self._handles.popleft()
        deadline = time.monotonic() + CALL_SECONDS
        while not self._agent.is_done(handle):
            if time.monotonic() > deadline:
                raise NetError("NIXL did not finish a write in time")
        return time.perf_counter()

    def close(self) -> None:
        self._agent.close()


class Linked:
    """A transport of Lockstep between this process and the peer."""

    def __init__(self, caller: Caller, transport: str, nbytes: int) -> None:
        self.name = transport
        there = caller.call("prepare", transport=transport, nbytes=nbytes)
        task, life = "/net/here", secrets.randbits(62) + 1
        self._end = LinkEnd(transport, caller.local_host, task, life, nbytes, caller.key, caller.ports)
        with contextlib.ExitStack() as unwind:
            unwind.callback(self._end.close)
            peer = PeerAddress("/net/there", int(there["incarnation"]), bytes.fromhex(there["address"]))
            answer_to = pack_ticket(self._end.grant(peer))
            address = self._end.address().address.hex()
            packed = caller.call(
                "link", transport=transport, task=task, incarnation=life, address=address, answer_to=answer_to
            )
            self._target = unpack_ticket(packed)
            self._end.connect(peer, dials=True, answer_to=None)
            self._end.wait_until_up()
            unwind.pop_all()

    def lender(self, name: str) -> Lent:
        """The same link, lending instead of writing."""
        return Lent(self, name)

    def start(self, nbytes: int, *, lend: bool = False) -> None:
        self._end.start(nbytes, self._target, lend=lend)

    def finish(self) -> float:
        return self._end.wait_answer()

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None:
        self._end.close()


class Lent:
    """Loans over a link: the peer reads in place and releases at once."""

    def __init__(self, link: Linked, name: str) -> None:
        self.name = name
        self._link = link

    def start(self, nbytes: int) -> None:
        self._link.start(nbytes, lend=True)

    def finish(self) -> float:
        return self._link.finish()

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...
