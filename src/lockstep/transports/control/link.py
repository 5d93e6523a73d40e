"""The control link: two tasks exchange envelopes over one stream, in order, until one side closes or dies.

The dialer opens ``Task.Link`` and sends a Hello; the acceptor answers with its own, or with Refused. After that
both may send anything. A side that closes sends an empty message, so that the other one can always tell a close from a
death. Every link has its own connection and its own thread at each end, on which all its callbacks come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from lockstep.protocol.core.causes import Reason, link_down
from lockstep.protocol.core.messages import Envelope, Hello, Refused
from lockstep.protocol.core.timing import CUT_SECONDS, FLUSH_SECONDS, HELLO_SECONDS
from lockstep.security.proof import ProofError, Refusal
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.strangers import Strangers
from lockstep.transports.base import LinkState
from lockstep.transports.control.callers import host_in
from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.codec import WireError, decode_envelopes, encode, join_envelopes
from lockstep.transports.control.outbox import Outbox, OutboxFullError
from lockstep.transports.control.reasons import explain
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.quiet_grpc import grpc

_OWNER_FAILED: Final = "a callback of the link's owner raised an error"

MAX_FIRST_BYTES: Final = 64 << 10
"""Of the first message of a link, a Hello with a few addresses."""

_GOODBYE: Final = b""
"""No envelopes at all: the last message of a side that closes."""


class LinkEvents(Protocol):
    """Callbacks of a link, on the link's thread. None of them may block."""

    def on_open(self, peer: Hello) -> None:
        """Both sides have introduced themselves."""

    def on_message(self, envelope: Envelope) -> None:
        """One envelope from the peer, in the order in which it sent them."""

    def on_lost(self, reason: Reason) -> None:
        """The link could not be opened (a peer that refuses gives the reason) or has ended. The last callback; not
        called at the end that called ``close``."""


class LinkEndedError(Exception):
    """Internal: why the reading side stops; the text is the phrase for ``on_lost``."""


class ControlLink:
    """One end of a control link."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.peer: Hello | None = None
        self._state = LinkState.CONNECTING
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._events: LinkEvents | None = None
        self._cut: Callable[[], object] = lambda: None
        self._overflow: str | None = None

    def __repr__(self) -> str:
        return f"<ControlLink {self.name} {self._state.value}>"

    @property
    def state(self) -> LinkState:
        return self._state

    def send(self, envelope: Envelope) -> bool:
        """Queue one envelope; never blocks. False: the link has ended and the envelope is dropped.

        Too much unsent data ends the link, because its peer does not read. ``WireError``: it cannot be encoded.
        """
        data = encode(envelope)
        try:
            return self._outbox.put(data)
        except OutboxFullError as full:
            self._overflow = f"the peer does not read: {full}"
            self._abort()
            return False

    def close(self, flush_seconds: float = FLUSH_SECONDS) -> None:
        """Send a goodbye, give queued envelopes up to ``flush_seconds`` to go out, end the link. May be called twice.

        Once it has returned there are no further callbacks, unless a callback called it or is still running.
        """
        with self._lock:
            if self._state in (LinkState.CONNECTING, LinkState.UP):
                connecting = self._state is LinkState.CONNECTING
                self._state = LinkState.CLOSED
            else:
                connecting = False
        if connecting:
            self._abort()
        self._outbox.close()
        if threading.current_thread() is self._thread:
            self._cut_later(flush_seconds)
            return
        if not self._ended.wait(flush_seconds):
            self._abort()
            self._ended.wait(CUT_SECONDS)

    def _cut_later(self, seconds: float) -> None:
        """Close from within a callback: the link's own thread cannot wait for itself."""

        def cut_if_still_open() -> None:
            if not self._ended.wait(seconds):
                self._abort()

        threading.Thread(target=cut_if_still_open, name=f"{self.name}-cut", daemon=True).start()

    def _abort(self) -> None:
        self._outbox.abort()
        self._cut()

    def _opened(self, peer: Hello, events: LinkEvents) -> None:
        with self._lock:
            if self._state is not LinkState.CONNECTING:
                raise LinkEndedError("closed while it was being opened")
            self._state = LinkState.UP
            self.peer = peer
            self._events = events
        events.on_open(peer)

    def _outgoing(self) -> Iterator[bytes]:
        """What gRPC's thread writes, until the link ends."""
        for batch in self._outbox.batches():
            yield join_envelopes(batch)
        if self._state is LinkState.CLOSED:
            yield _GOODBYE

    def _receive(self, envelopes: Iterator[Envelope]) -> None:
        """Pass envelopes to the owner until the stream ends, which raises."""
        for envelope in envelopes:
            if self._state is LinkState.UP and self._events is not None:
                self._events.on_message(envelope)

    def _finish(self, reason: Reason) -> None:
        """The reading side has ended: notify the owner, once."""
        with self._lock:
            tell = self._state in (LinkState.CONNECTING, LinkState.UP)
            if tell:
                self._state = LinkState.LOST
        self._outbox.close()
        if tell and self._events is not None:
            self._events.on_lost(link_down(self._overflow) if self._overflow else reason)


def _envelopes(incoming: Iterable[bytes]) -> Iterator[Envelope]:
    """The peer's envelopes one by one. Never just ends: ``LinkEndedError`` or ``WireError`` says why it stopped."""
    first = True
    for data in incoming:
        if data == _GOODBYE:
            raise LinkEndedError("closed by the peer")
        if first and len(data) > MAX_FIRST_BYTES:
            raise WireError(f"a link began with {len(data)} bytes, more than the {MAX_FIRST_BYTES} of any Hello")
        first = False
        yield from decode_envelopes(data)
    raise LinkEndedError("the connection ended without a goodbye")


def _introduce(hello: Hello) -> bytes:
    return encode(Envelope(hello.job, hello.task, hello.incarnation, hello))


class _Dialer:
    """Runs the dialing end of one link on the link's thread."""

    def __init__(self, address: str, hello: Hello, events: LinkEvents, deadline_seconds: float) -> None:
        self.link = ControlLink(f"link-to-{address}")
        self._address = address
        self._events = events
        self._deadline = deadline_seconds
        self._late = False
        self.link._events = events
        self.link._outbox.put(_introduce(hello))
        self.link._thread = threading.Thread(target=self._run, name=self.link.name, daemon=True)

    def start(self) -> None:
        assert self.link._thread is not None
        self.link._thread.start()

    def _run(self) -> None:
        link = self.link
        with open_channel(self._address) as channel:
            call = channel.stream_stream(method_path("Task", "Link"))(link._outgoing())
            link._cut = call.cancel
            if link.state is LinkState.CLOSED:  # closed before there was anything to cut
                call.cancel()
            timer = threading.Timer(self._deadline, self._expire, (call,))
            timer.name = f"{link.name}-deadline"
            timer.daemon = True
            timer.start()
            reason = link_down(_OWNER_FAILED)
            try:
                reason = self._talk(call, timer)
            finally:
                timer.cancel()
                call.cancel()
                link._finish(reason)
                link._ended.set()

    def _expire(self, call: grpc.Call) -> None:
        self._late = self.link.state is LinkState.CONNECTING
        if self._late:
            call.cancel()

    def _talk(self, call: Iterator[bytes], timer: threading.Timer) -> Reason:
        """Read to the end; the reason for the end."""
        envelopes = _envelopes(call)
        try:
            first = next(envelopes).message
            timer.cancel()
            if isinstance(first, Refused):
                return first.reason
            if not isinstance(first, Hello):
                return link_down(f"{self._address} began with {type(first).__name__} instead of Hello")
            self.link._opened(first, self._events)
            self.link._receive(envelopes)
        except grpc.RpcError as error:
            if self._late:
                return link_down(explain(_Late(), self._address, self._deadline))
            return link_down(explain(error, self._address, self._deadline))
        except (LinkEndedError, WireError) as error:
            return link_down(str(error))
        raise AssertionError("a link reads until something ends it")


class _Late(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The deadline of a dial ran out. (gRPC's own deadline would also end a stream that is up.)"""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "deadline of the dial"


def dial_link(address: str, hello: Hello, events: LinkEvents, deadline_seconds: float) -> ControlLink:
    """Open a link to the task at ``host:port``. Returns at once; ``on_open`` or ``on_lost`` follows by the deadline.

    One attempt: if nothing listens, ``on_lost`` comes at once, and the caller decides when to try again.
    """
    dialer = _Dialer(address, hello, events, deadline_seconds)
    dialer.start()
    return dialer.link


OnHello = Callable[[Hello], Hello | Refused]
MakeEvents = Callable[[Hello, ControlLink], LinkEvents]


class _Acceptor:
    """Runs the accepting end of one link: gRPC's thread writes, the link's own thread reads."""

    def __init__(
        self,
        on_hello: OnHello,
        make_events: MakeEvents,
        strangers: Strangers,
        refused: Callable[[str, ProofError], None],
    ) -> None:
        self.link = ControlLink("link-accepted")
        self._strangers = strangers
        self._refused = refused
        self._on_hello = on_hello
        self._make_events = make_events
        self._decided = threading.Event()

    def serve(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        link = self.link
        link._cut = context.cancel
        if not context.add_callback(self._on_rpc_over):
            self._on_rpc_over()
        link._thread = threading.Thread(target=self._read, args=(incoming,), name=link.name, daemon=True)
        link._thread.start()
        try:
            with self._strangers.place(context.cancel):
                decided = self._decided.wait(HELLO_SECONDS)
        except ProofError as error:
            link._outbox.abort()
            self._refused(host_in(context.peer()), error)
            return
        if not decided:
            link._outbox.abort()
            self._refused(host_in(context.peer()), ProofError(Refusal.LATE))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"no Hello within {HELLO_SECONDS:g} s")
        yield from link._outgoing()

    def _on_rpc_over(self) -> None:
        self.link._outbox.abort()
        self._decided.set()

    def _read(self, incoming: Iterator[bytes]) -> None:
        reason = link_down(_OWNER_FAILED)
        try:
            reason = self._talk(incoming)
        finally:
            self._decided.set()
            self.link._finish(reason)
            self.link._ended.set()

    def _talk(self, incoming: Iterator[bytes]) -> Reason:
        link = self.link
        envelopes = _envelopes(incoming)
        try:
            first = next(envelopes).message
            if not isinstance(first, Hello):
                return self._refuse(link_down(f"a link must begin with Hello, not with {type(first).__name__}"))
            answer = self._on_hello(first)
            if isinstance(answer, Refused):
                return self._refuse(answer.reason)
            link.name = f"link-from-{first.task}"
            threading.current_thread().name = link.name
            link._outbox.put(_introduce(answer))
            self._decided.set()
            link._opened(first, self._make_events(first, link))
            link._receive(envelopes)
        except (LinkEndedError, WireError) as error:
            return link_down(str(error))
        except grpc.RpcError:
            return link_down("the connection ended without a goodbye")
        raise AssertionError("a link reads until something ends it")

    def _refuse(self, reason: Reason) -> Reason:
        self.link._outbox.put(encode(Envelope(0, "", 0, Refused(reason))))
        self.link._outbox.close()
        self._decided.set()
        return reason


def serve_links(server: ControlServer, on_hello: OnHello, make_events: MakeEvents) -> None:
    """Accept links at ``server``: ``on_hello`` accepts or refuses a peer, ``make_events`` makes a link's owner.

    Streams without a Hello hold a third of the server's threads at most; the first that came makes room for a new one.
    """
    strangers = Strangers(max(1, server.threads // 3))
    refused = REFUSALS.at(Entrance.TASK, server.address)

    def handle(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        return _Acceptor(on_hello, make_events, strangers, refused).serve(incoming, context)

    server.add_handlers("Task", {"Link": grpc.stream_stream_rpc_method_handler(handle)})
