"""Opening the gRPC stream of a data link: dialing and accepting.

Both ends prove that they know the job's key before the stream gets to an endpoint, or replaces one. The proof is made
with the key itself and not with a ticket from the control link: this needs nothing of that link, so it is the same for
``lockstep net``, which has none, and the two incarnations in it bind a stream to its link just as well.

With ``--insecure`` the hello asks for no proof; an end with a key and one without refuse each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.timing import CONNECT_SECONDS, HELLO_SECONDS
from lockstep.security.key import Key, Purpose
from lockstep.security.proof import (
    INSECURE,
    Acceptor,
    Dialer,
    Parties,
    ProofError,
    Refusal,
    check_agreement,
)
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.strangers import Strangers
from lockstep.security.wire import FIRST_SECONDS
from lockstep.transports import phrases
from lockstep.transports.base import PeerAddress
from lockstep.transports.control.callers import host_in
from lockstep.transports.control.channels import PLAIN, is_plain, open_data_channel
from lockstep.transports.control.reasons import explain
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.frame_error import FrameError
from lockstep.transports.meeting import ExpectedVisitor, Meeting, MeetingEndpoint
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.stream.frames import (
    FrameKind,
    Header,
    StreamHello,
    pack,
    pack_fault,
    pack_hello,
    pack_refusal,
    unpack_hello,
    unpack_proof,
)
from lockstep.transports.stream.sending import Sender
from lockstep.transports.timers import TimerThread
from lockstep.version import __version__

STRANGERS: Final = 8
"""Streams of each method that have not proven anything; each holds a thread of the server."""


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

    def __init__(
        self,
        server: ControlServer,
        method: str,
        task: str,
        incarnation: int,
        timers: TimerThread,
        key: Key | None,
        *,
        bulk: bool,
    ) -> None:
        """``server`` must not have been started yet. ``bulk``: without TLS, which would slow down so many bytes."""
        self._bulk = bulk
        self._method = method
        self._task = task
        self._incarnation = incarnation
        self._timers = timers
        self._key = None if key is None else key.sub(Purpose.DATA)
        self._strangers = Strangers(STRANGERS)
        self._meeting: Meeting[AnyEndpoint, _Stream] = Meeting(task, incarnation)
        handlers = {method: grpc.stream_stream_rpc_method_handler(self._serve)}
        if bulk:
            self.address = server.add_bulk_handlers("Task", handlers)
        else:
            server.add_handlers("Task", handlers)
            self.address = server.address
        """What peers dial."""
        self._entrance = Entrance.TENSORS if bulk else Entrance.TASK

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
        if not self._bulk and is_plain(address):
            return phrases.sends_in_the_clear(peer.task)
        first: SimpleQueue[bytes | None] = SimpleQueue()
        with open_data_channel(address) as channel:
            call = channel.stream_stream(method_path("Task", self._method))(_outgoing(first, endpoint.sender))
            endpoint.attach(call.cancel)
            late = threading.Event()

            def give_up() -> None:
                late.set()
                call.cancel()

            deadline = self._timers.later(CONNECT_SECONDS, give_up)
            try:
                self._introduce(call, first, peer)
                deadline.cancel()
                return endpoint.converse(call)
            except FrameError as fault:
                return str(fault)
            except ProofError as refusal:
                return f"{peer.task} at {address} is refused, or refuses: {refusal}"
            except grpc.RpcError as error:
                if late.is_set():
                    return f"{peer.task} at {address} did not answer within {CONNECT_SECONDS:g} s"
                return explain(error, address.removeprefix(PLAIN))
            finally:
                first.put(None)
                deadline.cancel()
                call.cancel()

    def _introduce(self, call: Iterator[bytes], first: SimpleQueue[bytes | None], peer: PeerAddress) -> None:
        """Return once the peer has proven itself, has accepted this end's proof, and expects the link."""
        hello = StreamHello(self._task, self._incarnation, peer.incarnation)
        if self._key is None:
            first.put(pack_hello(hello))
        else:
            parties = self._parties(hello, peer.task, peer.address.decode(errors="replace"))
            dialer = Dialer(self._key, parties)
            first.put(pack_hello(hello._replace(nonce=dialer.nonce)))
            proof, _ = dialer.answer(unpack_proof(_next(call, peer)))
            first.put(pack(Header(FrameKind.PROOF), proof))
        _check_hello(_next(call, peer), peer, self._incarnation)
        first.put(None)

    def _parties(self, hello: StreamHello, acceptor: str, address: str) -> Parties:
        return Parties(
            purpose=f"Task.{self._method}",
            dialer=hello.task,
            acceptor=acceptor,
            version=__version__,
            dialer_life=hello.incarnation,
            acceptor_life=hello.meant,
            acceptor_address=address,
        )

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
        try:
            with self._strangers.place(context.cancel) as place:
                with self._within(FIRST_SECONDS, context):
                    hello = unpack_hello(next(incoming, b""))
                place.spoke()
                check_agreement(self._key, hello.nonce)
                if self._key is not None:
                    acceptor = self._challenge(self._key, hello)
                    yield pack(Header(FrameKind.PROOF), acceptor.opening)
                    with self._within(HELLO_SECONDS, context):
                        acceptor.check(unpack_proof(next(incoming, b"")))
        except FrameError as fault:
            self._say_refused(context, Refusal.MALFORMED)
            yield pack_fault(str(fault))
            return
        except ProofError as error:
            self._say_refused(context, error.refusal)
            yield pack_refusal(error.refusal)
            return
        except grpc.RpcError:  # it has hung up
            return
        try:
            expected = self._meeting.match(hello.task, hello.incarnation, hello.meant)
        except FrameError as fault:
            yield pack_fault(str(fault))
            return
        endpoint = expected.endpoint
        if not context.add_callback(endpoint.sender.end):
            endpoint.sender.end()
        expected.visits.put(_Stream(incoming, context))
        yield pack_hello(StreamHello(self._task, self._incarnation, hello.incarnation))
        yield from endpoint.sender.frames()

    def _challenge(self, key: bytes, hello: StreamHello) -> Acceptor:
        """Strangers do not learn which incarnation this is."""
        if hello.meant != self._incarnation:
            raise ProofError(Refusal.OTHER_TARGET)
        return Acceptor(key, self._parties(hello, self._task, self.address), hello.nonce)

    def _say_refused(self, context: grpc.ServicerContext, refusal: Refusal) -> None:
        REFUSALS.note(self._entrance, self.address.removeprefix(PLAIN), host_in(context.peer()), refusal)

    @contextmanager
    def _within(self, seconds: float, context: grpc.ServicerContext) -> Iterator[None]:
        """Cut the stream if what is waited for does not come in time: ``ProofError``."""
        late = threading.Event()

        def cut() -> None:
            late.set()
            context.cancel()

        silence = self._timers.later(seconds, cut)
        try:
            yield
        except (FrameError, grpc.RpcError) as error:
            if late.is_set():
                raise ProofError(Refusal.LATE) from error
            raise
        finally:
            silence.cancel()


def _outgoing(first: SimpleQueue[bytes | None], sender: Sender[Any]) -> Iterator[bytes]:
    """What the dialer sends: how it introduces itself, and nothing of the endpoint's before that is over."""
    while (frame := first.get()) is not None:
        yield frame
    yield from sender.frames()


def _next(call: Iterator[bytes], peer: PeerAddress) -> bytes:
    frame = next(call, b"")
    if not frame:
        raise FrameError(f"{peer.task} closed the stream before it identified itself")
    return frame


def _check_hello(frame: bytes, peer: PeerAddress, mine: int) -> None:
    """The answer must come from the incarnation we meant, and mean ours."""
    answer = unpack_hello(frame)
    if answer != StreamHello(peer.task, peer.incarnation, mine, INSECURE):
        raise FrameError(f"{answer.task} in incarnation {hex64(answer.incarnation)} answered instead of {peer.task}")
