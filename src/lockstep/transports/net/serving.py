"""The passive process of a measurement: it does what the active one requests, and ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from lockstep.transports.base import PeerAddress, TransportError
from lockstep.transports.control.ports import PortRange, PortsUsedUp, listen_at, parse_ports
from lockstep.transports.control.server import ControlServer
from lockstep.transports.net.control import NetError, answer_calls
from lockstep.transports.net.links import LinkEnd, pack_ticket, unpack_ticket
from lockstep.transports.net.measured import describe_machine
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.ucx.agent import Agent, AgentError
from lockstep.transports.ucx.network import nixl_at
from lockstep.version import __version__

MAX_BYTES: Final = 1 << 30
TASK: Final = "/net/there"


class Serving:
    """What one caller may request."""

    def __init__(self, host: str, ports: PortRange | None = None) -> None:
        self._host = host
        self._ports = ports
        self._incarnation = secrets.randbits(62) + 1
        self._ends: dict[str, LinkEnd] = {}
        self._closing: list[Callable[[], None]] = []
        self._memory = bytearray()

    def methods(self) -> dict[str, Callable[..., Any]]:
        calls = (self.hello, self.cpu, self.prepare, self.link, self.tcp, self.bare_grpc, self.bare_nixl, self.poll)
        return {call.__name__: call for call in calls}

    def hello(self, version: str) -> str:
        if version != __version__:
            raise NetError(
                f"that side runs Lockstep {version}, this one {__version__}; install the same version on both"
            )
        return describe_machine()

    def cpu(self) -> float:
        return time.process_time()

    def prepare(self, transport: str, nbytes: int) -> dict[str, Any]:
        """Make this side's transport and region; returns its address."""
        end = LinkEnd(transport, self._host, TASK, self._incarnation, _bounded(nbytes), self._ports)
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
        memory = memoryview(bytearray(_bounded(nbytes)))
        listener = listen_at(self._host, self._ports)
        self._closing.append(listener.close)
        threading.Thread(target=_receive, args=(listener, memory), name="net-tcp", daemon=True).start()
        return int(listener.getsockname()[1])

    def bare_grpc(self, nbytes: int) -> str:
        """A bare stream of grpcio: copies each message into memory, and answers the last of each transfer."""
        memory = memoryview(bytearray(_bounded(nbytes)))

        def stream(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:  # noqa: ARG001
            at = 0
            for message in incoming:
                data = memoryview(message)[1:]
                memory[at : at + len(data)] = data
                at += len(data)
                if message[0]:
                    at = 0
                    yield b"!"

        server = ControlServer(self._host, 0, threads=4, ports=self._ports)
        server.add_handlers("Net", {"Bare": grpc.stream_stream_rpc_method_handler(stream)})
        server.start()
        self._closing.append(lambda: server.stop(0))
        return server.address

    def bare_nixl(self, nbytes: int) -> dict[str, Any]:
        """A bare agent of NIXL with memory to write to."""
        memory = self._memory = bytearray(_bounded(nbytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        agent = Agent(nixl_at(self._host, self._ports), f"net-there-{secrets.token_hex(8)}")
        agent.register(1, address, nbytes)
        self._nixl = _Polled(agent)
        self._closing.append(self._nixl.close)
        return {"metadata": agent.metadata_of(1).hex(), "address": address}

    def poll(self, on: bool) -> None:
        """Drive the bare agent, or stop driving it."""
        self._nixl.poll(on)

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


def _bounded(nbytes: int) -> int:
    if not 0 < nbytes <= MAX_BYTES:
        raise NetError(f"a region of {nbytes} bytes was requested; it must have 1 to {MAX_BYTES} bytes")
    return nbytes


def _receive(listener: socket.socket, memory: memoryview) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while header := connection.recv(8, socket.MSG_WAITALL):
                (left,) = struct.unpack("<Q", header)
                at = 0
                while at < left:
                    at += connection.recv_into(memory[at:left])
                connection.sendall(b"!")


def serve_one(listener: socket.socket, ports: PortRange | None = None) -> None:
    """Serve one caller until it hangs up."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    serving = Serving(str(connection.getsockname()[0]), ports)
    try:
        answer_calls(connection, serving.methods(), (NetError, TransportError, AgentError, PortsUsedUp))
    finally:
        serving.close()


def main() -> None:
    """The child of a measurement on one machine: print the port, serve the parent, and end."""
    ports = parse_ports(sys.argv[1]) if len(sys.argv) > 1 else None
    with listen_at("127.0.0.1", ports) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        serve_one(listener, ports)


if __name__ == "__main__":
    main()
