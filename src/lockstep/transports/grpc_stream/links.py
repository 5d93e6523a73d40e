"""Opening the gRPC stream of a data link: dialing, accepting, and finding the endpoint that a visitor means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from lockstep.protocol.ids import hex64
from lockstep.protocol.timing import CONNECT_SECONDS, HELLO_SECONDS, MATCH_SECONDS
from lockstep.transports.base import LinkState, PeerAddress, TransportError
from lockstep.transports.clerk import Clerk
from lockstep.transports.grpc_stream.frames import FrameError, pack_fault, pack_hello, unpack_hello
from lockstep.transports.grpc_stream.sending import Sender
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.wire.channels import open_data_channel
from lockstep.transports.wire.reasons import explain
from lockstep.transports.wire.server import ControlServer, method_path

_Life = tuple[str, int]


@dataclass(slots=True)
class _Stream:
    """What gRPC gives an acceptor: the peer's frames, and a way to break the call off."""

    incoming: Iterator[bytes]
    context: grpc.ServicerContext


class StreamEndpoint(Protocol):
    """An endpoint that lives on such a stream."""

    peer: PeerAddress
    sender: Sender

    @property
    def state(self) -> LinkState: ...

    def attach(self, cut: Callable[[], object]) -> None:
        """There is a stream now, and ``cut`` breaks it off."""

    def converse(self, incoming: Iterable[bytes]) -> str:
        """Both sides know each other: read until the stream ends; the reason of the end."""

    def close(self) -> None: ...


AnyEndpoint = TypeVar("AnyEndpoint", bound=StreamEndpoint)


@dataclass(slots=True)
class _Expected(Generic[AnyEndpoint]):
    """An accepting endpoint, and the stream it waits for (None: give up)."""

    endpoint: AnyEndpoint
    streams: SimpleQueue[_Stream | None] = field(default_factory=SimpleQueue)
    taken: bool = False


class StreamLinks(Generic[AnyEndpoint]):
    """All links of one transport of one task, each on a stream of ``Task.<method>``."""

    def __init__(self, server: ControlServer, method: str, task: str, incarnation: int, clerk: Clerk) -> None:
        """``server`` must not have been started yet."""
        self._method = method
        self._task = task
        self._incarnation = incarnation
        self._clerk = clerk
        self._arrivals = threading.Condition()
        self._expected: dict[_Life, _Expected[AnyEndpoint]] = {}
        self._endpoints: list[AnyEndpoint] = []
        self._closed = False
        server.add_handlers("Task", {method: grpc.stream_stream_rpc_method_handler(self._serve)})

    def open(self, endpoint: AnyEndpoint, dials: bool) -> Callable[[AnyEndpoint], str]:
        """Take part in a link; what its thread has to do: connect, converse, and return the reason of the end."""
        peer = endpoint.peer
        life = (peer.task, peer.incarnation)
        expected = _Expected(endpoint)
        with self._arrivals:
            if self._closed:
                raise TransportError("this transport is closed: make another one")
            if not dials:
                self._expect(life, expected)
            self._endpoints = [e for e in self._endpoints if e.state in (LinkState.CONNECTING, LinkState.UP)]
            self._endpoints.append(endpoint)
        return self._dial if dials else lambda _: self._accept(life, expected)

    def _expect(self, life: _Life, expected: _Expected[AnyEndpoint]) -> None:
        before = self._expected.get(life)
        if before is not None and before.endpoint.state in (LinkState.CONNECTING, LinkState.UP):
            raise TransportError(f"there is a link with this life of {life[0]} already: close it first")
        self._expected[life] = expected
        self._arrivals.notify_all()

    def endpoints(self) -> list[AnyEndpoint]:
        """The links that may still be open."""
        return list(self._endpoints)

    def close(self) -> None:
        """End all links, and open no more."""
        with self._arrivals:
            self._closed = True
            self._arrivals.notify_all()
        for endpoint in self._endpoints:
            endpoint.close()

    # --- the dialing end, on the endpoint's thread ---------------------------------------------------------------

    def _dial(self, endpoint: AnyEndpoint) -> str:
        peer = endpoint.peer
        address = peer.address.decode(errors="replace")
        endpoint.sender.add_urgent(pack_hello(self._task, self._incarnation, peer.incarnation))
        with open_data_channel(address) as channel:
            call = channel.stream_stream(method_path("Task", self._method))(endpoint.sender.frames())
            endpoint.attach(call.cancel)
            late = threading.Event()

            def give_up() -> None:
                late.set()
                call.cancel()

            deadline = self._clerk.later(CONNECT_SECONDS, give_up)
            try:
                _check_hello(next(call, b""), peer, self._incarnation)
                deadline.cancel()
                return endpoint.converse(call)
            except FrameError as fault:
                return str(fault)
            except grpc.RpcError as error:
                if late.is_set():
                    return f"{peer.task} at {address} did not answer within {CONNECT_SECONDS:g} s"
                return explain(error, address)
            finally:
                deadline.cancel()
                call.cancel()

    # --- the accepting end ---------------------------------------------------------------------------------------

    def _accept(self, life: _Life, expected: _Expected[AnyEndpoint]) -> str:
        """Wait for the peer's stream and live on it; on the endpoint's thread."""
        endpoint = expected.endpoint
        endpoint.attach(lambda: expected.streams.put(None))
        try:
            stream = expected.streams.get(timeout=CONNECT_SECONDS)
        except Empty:
            stream = None
        try:
            if stream is None:
                return f"{life[0]} did not connect within {CONNECT_SECONDS:g} s"
            endpoint.attach(stream.context.cancel)
            return endpoint.converse(stream.incoming)
        finally:
            with self._arrivals:
                expected.taken = True
                if self._expected.get(life) is expected:
                    del self._expected[life]

    def _serve(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """A stream came in; gRPC's thread is the sender of its endpoint from here on."""
        silence = self._clerk.later(HELLO_SECONDS, context.cancel)
        try:
            first = next(incoming, b"")
        except grpc.RpcError:
            return
        finally:
            silence.cancel()
        try:
            task, incarnation, mine = unpack_hello(first)
            expected = self._match(task, incarnation, mine)
        except FrameError as refusal:
            yield pack_fault(str(refusal))
            return
        endpoint = expected.endpoint
        endpoint.sender.add_urgent(pack_hello(self._task, self._incarnation, incarnation))
        if not context.add_callback(endpoint.sender.end):
            endpoint.sender.end()
        expected.streams.put(_Stream(incoming, context))
        yield from endpoint.sender.frames()

    def _match(self, task: str, incarnation: int, mine: int) -> _Expected[AnyEndpoint]:
        """The endpoint that waits for this life; ``FrameError`` is the refusal that the visitor reads."""
        if mine != self._incarnation:
            raise FrameError(f"{self._task} is in life {hex64(self._incarnation)} now, not in {hex64(mine)}")
        deadline = time.monotonic() + MATCH_SECONDS
        with self._arrivals:
            while not self._closed:
                expected = self._expected.get((task, incarnation))
                if expected is not None and not expected.taken:
                    expected.taken = True
                    return expected
                if expected is not None:
                    raise FrameError(f"{self._task} has a link with this life of {task} already")
                if not self._arrivals.wait(max(0.0, deadline - time.monotonic())):
                    raise FrameError(f"{self._task} does not expect {task} in life {hex64(incarnation)}")
        raise FrameError(f"{self._task} is closing")


def _check_hello(frame: bytes, peer: PeerAddress, mine: int) -> None:
    """The answer must come from the life we meant, and mean us."""
    if not frame:
        raise FrameError(f"{peer.task} closed the stream before it said who it is")
    task, incarnation, meant = unpack_hello(frame)
    if (task, incarnation, meant) != (peer.task, peer.incarnation, mine):
        raise FrameError(f"{task} in life {hex64(incarnation)} answered instead of {peer.task}")
