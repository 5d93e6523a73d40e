"""The passive process of a measurement: it does what the active one requests, and ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from lockstep.security.chosen import chosen_key
from lockstep.security.key import Key
from lockstep.security.listening import ProvenListener
from lockstep.security.proof import INSECURE, Acceptor, ProofError, check_agreement
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.strangers import Strangers
from lockstep.security.wire import ProvenSocket
from lockstep.transports.base import PeerAddress, TransportError
from lockstep.transports.control.addresses import Address
from lockstep.transports.control.callers import host_in
from lockstep.transports.control.ports import PortRange, PortsUsedUp, listen_at, parse_ports
from lockstep.transports.control.server import ControlServer
from lockstep.transports.memory import available_memory
from lockstep.transports.net.control import (
    BARE_GRPC,
    IDLE_SECONDS,
    TCP,
    NetError,
    answer_calls,
    believed,
    net_key,
    net_parties,
)
from lockstep.transports.net.links import LinkEnd, pack_ticket, unpack_ticket
from lockstep.transports.net.measured import describe_machine
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.ucx.agent import Agent, AgentError
from lockstep.transports.ucx.network import nixl_at

_Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]

MAX_BYTES: Final = 1 << 30
TASK: Final = "/net/there"


class Serving:
    """What one caller may request."""

    def __init__(self, host: str, key: Key | None, ports: PortRange | None = None) -> None:
        self._host = host
        self._key = key
        self._ports = ports
        self._taken: set[str] = set()
        self._incarnation = secrets.randbits(62) + 1
        self._ends: dict[str, LinkEnd] = {}
        self._closing: list[Callable[[], None]] = []
        self._memory = bytearray()

    def methods(self) -> dict[str, Callable[..., Any]]:
        calls = (self.describe, self.cpu, self.prepare, self.link, self.tcp, self.bare_grpc, self.bare_nixl, self.poll)
        return {call.__name__: call for call in calls}

    def describe(self) -> str:
        return describe_machine()

    def cpu(self) -> float:
        return time.process_time()

    def prepare(self, transport: str, nbytes: int) -> dict[str, Any]:
        """Make this side's transport and region; returns its address."""
        nbytes = self._bounded(transport, nbytes)
        end = LinkEnd(transport, self._host, TASK, self._incarnation, nbytes, self._key, self._ports)
        self._ends[transport] = end
        self._closing.append(end.close)
        return {"incarnation": self._incarnation, "address": end.address().address.hex()}

    def link(
        self, transport: str, task: str, incarnation: int, address: str, answer_to: dict[str, Any]
    ) -> dict[str, Any]:
        """Accept the caller's link; returns the ticket of this side's region."""
        end = self._ends[transport]
        peer = PeerAddress(task, incarnation, bytes.fromhex(address))
        ticket = end.grant(peer)
        end.connect(peer, dials=False, answer_to=unpack_ticket(answer_to))
        return pack_ticket(ticket)

    # --- what the transports are compared with ------------------------------------------------------------------------

    def tcp(self, nbytes: int) -> int:
        """A bare socket: receives into memory and answers each message with one byte. Returns its port."""
        memory = memoryview(bytearray(self._bounded("tcp", nbytes)))
        listener = listen_at(self._host, self._ports)
        port = int(listener.getsockname()[1])
        use = partial(_receive, memory=memory)
        refused = REFUSALS.at(Entrance.NET, _address_of(listener))
        door = ProvenListener(listener, net_key(self._key), believed(TCP), use, "net-tcp", refused)
        self._closing.append(door.close)
        return port

    def bare_grpc(self, nbytes: int) -> str:
        """A bare stream of grpcio: copies each message into memory, and answers the last of each transfer."""
        memory = memoryview(bytearray(self._bounded("bare_grpc", nbytes)))
        key, strangers = net_key(self._key), Strangers(2)

        def stream(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with strangers.place(context.cancel):
                first = next(incoming, INSECURE)
                check_agreement(key, first)
                if key is not None:
                    acceptor = Acceptor(key, net_parties(BARE_GRPC), first)
                    yield acceptor.opening
                    acceptor.check(next(incoming, b""))
            at = 0
            for message in incoming:
                data = memoryview(message)[1:]
                if not message or at + len(data) > len(memory):
                    return
                memory[at : at + len(data)] = data
                at += len(data)
                if message[0]:
                    at = 0
                    yield b"!"

        server = ControlServer(self._host, 0, threads=4, ports=self._ports, entrance=Entrance.NET)
        refused = REFUSALS.at(Entrance.NET, server.address)
        handler = grpc.stream_stream_rpc_method_handler(_quietly(stream, refused))
        # Without TLS, as the transport that is compared with it.
        address = server.add_bulk_handlers("Net", {"Bare": handler})
        server.start()
        self._closing.append(lambda: server.stop(0))
        return address

    def bare_nixl(self, nbytes: int) -> dict[str, Any]:
        """A bare agent of NIXL with memory to write to."""
        memory = self._memory = bytearray(self._bounded("bare_nixl", nbytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        agent = Agent(nixl_at(self._host, self._ports), f"net-there-{secrets.token_hex(8)}")
        agent.register(1, address, nbytes)
        self._nixl = _Polled(agent)
        self._closing.append(self._nixl.close)
        return {"metadata": agent.metadata_of(1).hex(), "address": address}

    def poll(self, on: bool) -> None:
        """Drive the bare agent, or stop driving it."""
        self._nixl.poll(on)

    def _bounded(self, kind: str, nbytes: int) -> int:
        """One region per kind: what a caller can have allocated has a limit."""
        if type(nbytes) is not int or not 0 < nbytes <= MAX_BYTES:
            raise NetError(f"a region of {nbytes!r} bytes was requested; it must have 1 to {MAX_BYTES} bytes")
        if nbytes > available_memory():
            raise NetError(f"a region of {nbytes} bytes was requested; this machine has {available_memory()} available")
        if kind in self._taken:
            raise NetError(f"this caller already has a region for {kind}")
        self._taken.add(kind)
        return nbytes

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


class _Polled:
    """Drives an agent on a separate thread while this is requested."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._wanted = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="net-nixl", daemon=True)
        self._thread.start()

    def poll(self, on: bool) -> None:
        if on:
            self._wanted.set()
        else:
            self._wanted.clear()

    def _run(self) -> None:
        while not self._ended:
            self._wanted.wait()
            with contextlib.suppress(AgentError):
                self._agent.progress()

    def close(self) -> None:
        self._ended = True
        self._wanted.set()
        self._thread.join(5.0)
        self._agent.close()


def _quietly(stream: _Stream, refused: Callable[[str, ProofError], None]) -> _Stream:
    """A stream of a stranger ends without a traceback."""

    def guarded(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from stream(incoming, context)
        except ProofError as error:
            refused(host_in(context.peer()), error)
        except grpc.RpcError:
            return

    return guarded


def _address_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return str(Address(host, port))


def _receive(proven: ProvenSocket, memory: memoryview) -> None:
    connection = proven.socket
    with contextlib.suppress(OSError), connection:
        connection.settimeout(IDLE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "little")
            at = 0
            while at < left <= len(memory) and (got := connection.recv_into(memory[at:left])):
                at += got
            if at < left:
                return
            connection.sendall(b"!")


class NetServer:
    """Serves callers that prove themselves, one after the other: two measurements would disturb each other."""

    def __init__(
        self,
        listener: socket.socket,
        key: Key | None,
        ports: PortRange | None = None,
    ) -> None:
        self.served = threading.Event()
        """Set once a caller has been served."""
        self._key = key
        self._ports = ports
        self._turn = threading.Lock()
        refused = REFUSALS.at(Entrance.NET, _address_of(listener))
        self._listener = ProvenListener(listener, net_key(key), believed("net"), self._serve, "net-serve", refused)
        self.close = self._listener.close

    def _serve(self, proven: ProvenSocket) -> None:
        with self._turn:
            serving = Serving(str(proven.socket.getsockname()[0]), self._key, self._ports)
            try:
                answer_calls(proven, serving.methods(), (NetError, TransportError, AgentError, PortsUsedUp))
            finally:
                serving.close()
                self.served.set()


def main() -> None:
    """The child of a measurement on one machine: print the port, serve the parent, and end."""
    ports = parse_ports(sys.argv[1]) if len(sys.argv) > 1 else None
    listener = listen_at("127.0.0.1", ports)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    server = NetServer(listener, chosen_key(), ports)
    parent = os.getppid()
    while not server.served.wait(1.0) and os.getppid() == parent:
        pass
    server.close()


if __name__ == "__main__":
    main()
