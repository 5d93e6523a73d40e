"""The gRPC server of a process; services and data planes add their handlers to it before it starts.

One port serves all calls, to callers with the key only (``credentials.py``). Streams of tensors have a second one.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from typing import Final

from lockstep.security.chosen import is_insecure
from lockstep.security.refusals import Entrance
from lockstep.transports.control.addresses import Address
from lockstep.transports.control.callers import CallerWatch
from lockstep.transports.control.channels import PLAIN, server_options
from lockstep.transports.control.credentials import add_plain_port, add_port
from lockstep.transports.control.ports import PortRange, ReservedPort
from lockstep.transports.quiet_grpc import grpc

PACKAGE: Final = "lockstep"


class ListenError(Exception):
    """The server cannot listen at this address; the text says why."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}")
        self.address = address


class PortTaken(ListenError):  # noqa: N818  # reads as the finding it is
    """Another socket already listens there."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "the port is taken by another process")


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Finds the handler of a call by its full method name."""

    def __init__(self) -> None:
        self.by_method: dict[str, grpc.RpcMethodHandler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self.by_method.get(handler_call_details.method)


class _Port:
    """One gRPC server at one port, with its own threads."""

    def __init__(
        self, host: str, port: int, ports: PortRange | None, threads: int, entrance: Entrance, *, plain: bool = False
    ) -> None:
        self._watch = None if is_insecure() else CallerWatch(entrance, plain=plain)
        if not port and ports is not None:
            with ReservedPort(host, ports) as reserved:
                self._listen(host, reserved.port, threads, plain)
        else:
            self._listen(host, port, threads, plain)

    def _listen(self, host: str, port: int, threads: int, plain: bool) -> None:
        self._host = host
        address = str(Address(host, port))
        _check_free(host, port, address)
        self.handlers = _Handlers()
        self.started = False
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rpc")
        options = server_options(threads, plain=plain)
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=threads)
        self._server.add_generic_rpc_handlers((self.handlers,))
        try:
            self.port = self._add(address, plain)
        except RuntimeError as error:
            self._pool.shutdown(wait=False)
            raise ListenError(address, str(error)) from error

    def _add(self, address: str, plain: bool) -> int:
        if plain or self._watch is None:
            return add_plain_port(self._server, address)
        return add_port(self._server, address, self._watch.begun)

    def add(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        if self.started:
            raise RuntimeError(f"handlers of {service} must be added before the server starts")
        for method, handler in handlers.items():
            name = method_path(service, method)
            if name in self.handlers.by_method:
                raise RuntimeError(f"{name} already has a handler")
            self.handlers.by_method[name] = handler if self._watch is None else self._watch.noting(handler)

    def start(self) -> None:
        self.started = True
        if self._watch is not None:
            self._watch.watch(str(Address(self._host, self.port)), self.port)
        self._server.start()
        self._at_exit = weakref.finalize(self, _stop_here, self._server, os.getpid())

    def stop(self, grace: float) -> None:
        if not self.started:
            # gRPC only frees the port of a running server; this one has no methods.
            self.handlers.by_method.clear()
            self.start()
        self._at_exit.detach()
        self._server.stop(grace).wait(grace + 5.0)
        if self._watch is not None:
            self._watch.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        # A call may not come back: its answer waits for a host that nobody reaches. Python would wait for it at exit.
        waited_for = getattr(pools, "_threads_queues", {})
        for thread in getattr(self._pool, "_threads", ()):
            waited_for.pop(thread, None)


def _stop_here(server: grpc.Server, pid: int) -> None:
    """When Python ends with the server still running: a handshake that begins then would ask it something. Not in a
    child of this process, where the server does not run."""
    if os.getpid() == pid:
        server.stop(0).wait(1.0)


class ControlServer:
    """Listens from construction on (so that ``port`` is known), and answers from ``start`` on.

    Every running call holds one thread, and a stream is a call that runs until it ends. Calls beyond ``threads`` are
    refused at once with a reason instead of waiting silently for a thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        threads: int,
        advertised_host: str | None = None,
        ports: PortRange | None = None,
        entrance: Entrance = Entrance.TASK,
    ) -> None:
        """``port`` 0: a port of ``ports``, or one that the kernel chooses. ``PortsUsedUp`` if all are taken.
        ``entrance``: what this is for whoever reads that a caller was refused."""
        self.listen_host = host
        self.ports = ports
        self.host = advertised_host or host
        self.threads = threads
        self._main = _Port(host, port, ports, threads, entrance)
        self._bulk: _Port | None = None

    @property
    def port(self) -> int:
        return self._main.port

    @property
    def address(self) -> str:
        """``host:port`` under which peers reach this server."""
        return str(Address(self.host, self.port))

    def add_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Serve these methods of ``service`` (``Task`` or ``Monitor``). Only before ``start``."""
        self._main.add(service, handlers)

    def add_bulk_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> str:
        """Serve streams of tensors without TLS, at a port of their own; returns the address for ``open_data_channel``.

        Encryption takes a good part of the processor time of such a stream. Whoever calls has proven nothing yet: the
        handlers demand a proof. With ``--insecure`` one port serves everything.
        """
        if is_insecure():
            self._main.add(service, handlers)
            return self.address
        if self._bulk is None:
            self._bulk = _Port(self.listen_host, 0, self.ports, self.threads, Entrance.TENSORS, plain=True)
        self._bulk.add(service, handlers)
        return f"{PLAIN}{Address(self.host, self._bulk.port)}"

    def start(self) -> None:
        """Answer calls from now on."""
        for port in self._open():
            port.start()

    def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones ``grace`` seconds, cut them off, and free the port and the threads."""
        for port in self._open():
            port.stop(grace)

    def _open(self) -> tuple[_Port, ...]:
        return (self._main,) if self._bulk is None else (self._main, self._bulk)


def method_path(service: str, method: str) -> str:
    """The full name by which a client calls a method."""
    return f"/{PACKAGE}.{service}/{method}"


def _check_free(host: str, port: int, address: str) -> None:
    """Raise a plain reason why gRPC would fail to bind; gRPC itself prints to stderr and raises a vague error."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(address, f"the name does not resolve ({error.strerror})") from error
    family, kind, protocol, _, where = infos[0]
    with socket.socket(family, kind, protocol) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(where)
            attempt.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(address) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise ListenError(address, "this machine has no such address") from error
            raise ListenError(address, error.strerror or str(error)) from error
