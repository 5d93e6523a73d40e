"""Opening the gRPC stream of a data link: dialing and accepting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.timing import CONNECT_SECONDS, HELLO_SECONDS
from lockstep.transports.base import PeerAddress
from lockstep.transports.control.channels import open_data_channel
from lockstep.transports.control.reasons import explain
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.frame_error import FrameError
from lockstep.transports.meeting import ExpectedVisitor, Meeting, MeetingEndpoint
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.stream.frames import pack_fault, pack_hello, unpack_hello
from lockstep.transports.stream.sending import Sender
from lockstep.transports.timers import TimerThread


@dataclass(slots=True)
class _Stream:
    """What gRPC gives an acceptor: the peer's frames, and the means to cancel the call."""

    incoming: Iterator[bytes]
    context: grpc.ServicerContext


class StreamEndpoint(MeetingEndpoint, Protocol):
    """An endpoint on such a stream."""

    sender: Sender[Any]

    def converse(self, incoming: Iterable[bytes]) -> str:
        """Both sides know each other: read until the stream ends; returns the reason for the end."""


AnyEndpoint = TypeVar("AnyEndpoint", bound=StreamEndpoint)


class StreamLinks(Generic[AnyEndpoint]):
    """All links of one transport of one task, each on a stream of ``Task.<method>``."""

    def __init__(self, server: ControlServer, method: str, task: str, incarnation: int, timers: TimerThread) -> None:
        """``server`` must not have been started yet."""
        self._method = method
        self._task = task
        self._incarnation = incarnation
        self._timers = timers
        self._meeting: Meeting[AnyEndpoint, _Stream] = Meeting(task, incarnation)
        server.add_handlers("Task", {method: grpc.stream_stream_rpc_method_handler(self._serve)})

    def open(self, endpoint: AnyEndpoint, dials: bool) -> Callable[[], str]:
        """Take part in a link; returns what its thread runs: connect, exchange frames, give the reason for the end."""
        expected = self._meeting.add(endpoint, dials)
        return lambda: self._dial(endpoint) if dials else self._accept(expected)

    def endpoints(self) -> list[AnyEndpoint]:
        """The endpoints that may still be open."""
        return self._meeting.endpoints()

    def close(self) -> None:
        """End all links, and open no more."""
        self._meeting.close()

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

            deadline = self._timers.later(CONNECT_SECONDS, give_up)
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

    def _accept(self, expected: ExpectedVisitor[AnyEndpoint, _Stream]) -> str:
        """Wait for the peer's stream and exchange frames on it; on the endpoint's thread."""
        endpoint = expected.endpoint
        try:
            with self._meeting.visit(expected) as stream:
                endpoint.attach(stream.context.cancel)
                return endpoint.converse(stream.incoming)
        except FrameError as absence:
            return str(absence)

    def _serve(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """A stream came in; this thread of gRPC is the sender of its endpoint from here on."""
        silence = self._timers.later(HELLO_SECONDS, context.cancel)
        try:
            first = next(incoming, b"")
        except grpc.RpcError:
            return
        finally:
            silence.cancel()
        try:
            task, incarnation, mine = unpack_hello(first)
            expected = self._meeting.match(task, incarnation, mine)
        except FrameError as refusal:
            yield pack_fault(str(refusal))
            return
        endpoint = expected.endpoint
        endpoint.sender.add_urgent(pack_hello(self._task, self._incarnation, incarnation))
        if not context.add_callback(endpoint.sender.end):
            endpoint.sender.end()
        expected.visits.put(_Stream(incoming, context))
        yield from endpoint.sender.frames()


def _check_hello(frame: bytes, peer: PeerAddress, mine: int) -> None:
    """The answer must come from the incarnation we meant, and mean ours."""
    if not frame:
        raise FrameError(f"{peer.task} closed the stream before it identified itself")
    task, incarnation, meant = unpack_hello(frame)
    if (task, incarnation, meant) != (peer.task, peer.incarnation, mine):
        raise FrameError(f"{task} in incarnation {hex64(incarnation)} answered instead of {peer.task}")
