"""The life of an endpoint on a gRPC stream: up, conversation, end, and that every transfer is settled exactly once.

What is said on the stream, and how bytes move, is the business of the transports that build on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, Generic, Protocol, Self, TypeVar

from lockstep.protocol.causes import Cause, Reason
from lockstep.protocol.timing import CUT_SECONDS, FLUSH_SECONDS
from lockstep.transports.base import Counters, EndpointEvents, LinkDownError, LinkState, PeerAddress, TransferId
from lockstep.transports.clerk import Clerk
from lockstep.transports.grpc_stream.frames import NO_PATH, FrameError, Header, Kind, pack, pack_fault, text_of, unpack
from lockstep.transports.grpc_stream.sending import Sender
from lockstep.transports.quiet_grpc import grpc

_OWNER_FAILED: Final = "a callback of the endpoint's owner raised an error"


class CannotMeet(Exception):  # noqa: N818  # nobody's error: there is no way between the two
    """The two ends cannot reach each other as this transport wants it; the text says what was tried.

    ``no_path``: that is proven, and trying again changes nothing.
    """

    def __init__(self, text: str, *, no_path: bool = False) -> None:
        super().__init__(text)
        self.no_path = no_path


class _Ended(Exception):  # noqa: N818  # not an error: how reading stops
    """Why no more frames are read; the text is the phrase for ``on_lost``."""


class Unsettled(Protocol):
    """A transfer of which the owner has not been told the end."""

    @property
    def number(self) -> TransferId: ...


AnyTransfer = TypeVar("AnyTransfer", bound=Unsettled)


class StreamLife(Generic[AnyTransfer]):
    """What all endpoints on such streams have in common. ``run`` is its life, given by the transport."""

    def __init__(self, peer: PeerAddress, events: EndpointEvents, clerk: Clerk, sender: Sender) -> None:
        self.peer = peer
        self.sender = sender
        self._events = events
        self._clerk = clerk
        self._state = LinkState.CONNECTING
        self._lock = threading.Lock()  # state and unsettled transfers
        self._telling = threading.RLock()  # one callback at a time, and none after close
        self._numbers = count(1)
        self._unsettled: dict[TransferId, AnyTransfer] = {}
        self._ended = threading.Event()
        self._cut: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self._end_reason = ""
        self._end_cause = Cause.LINK_DOWN
        self._sent = [0, 0, 0]  # bytes, writes, loans; written by the thread that sends only
        self._received = [0, 0, 0]  # the same; written by the endpoint's thread only

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.peer.task} {self._state.value}>"

    @property
    def state(self) -> LinkState:
        return self._state

    # --- what a transport adds ------------------------------------------------------------------------------

    def _meet(self, incoming: Iterable[bytes]) -> None:
        """Before the link is up: tell the peer what it needs to know. FrameError and CannotMeet end the link."""

    def _obey(self, header: Header, payload: memoryview) -> None:
        """A frame of the peer, of a kind that only this transport knows. FrameError ends the link."""
        raise NotImplementedError

    def _stop_landing(self) -> None:
        """Once this has returned, nothing of the peer lands in memory any more."""
        raise NotImplementedError

    def _refuse_if_over(self) -> None:
        """Raise where no transfer can be started; under the lock."""
        if self._state in (LinkState.LOST, LinkState.CLOSED):
            raise LinkDownError(f"the link to {self.peer.task} is {self._state.value}: {self._end_reason}")

    def counters(self) -> Counters:
        (sent, writes, loans), (received, writes_in, loans_in) = self._sent, self._received
        return Counters(sent, writes, received, writes_in, loans, loans_in)

    def close(self) -> None:
        with self._lock:
            connecting = self._state is LinkState.CONNECTING
            if self._state in (LinkState.CONNECTING, LinkState.UP):
                self._state = LinkState.CLOSED
                self._end_reason = "this end closed it"
        self._stop_landing()
        self.sender.end(pack(Header(Kind.GOODBYE)))
        if connecting:
            self._cut()
        if threading.current_thread() is self._thread:
            self._clerk.later(FLUSH_SECONDS, self._cut_if_open)
            return
        if not self._ended.wait(FLUSH_SECONDS):
            self._cut()
            self._ended.wait(CUT_SECONDS)
        with self._telling:  # a callback that was under way has returned now
            pass

    def _cut_if_open(self) -> None:
        if not self._ended.is_set():
            self._cut()

    # --- the life of the link, on the endpoint's thread -----------------------------------------------------

    def run(self, talk: Callable[[Self], str]) -> None:
        """Live: ``talk`` connects, reads to the end and returns the reason of the end."""
        self._thread = threading.current_thread()
        reason = _OWNER_FAILED
        try:
            reason = talk(self)
        finally:
            self._finish(reason)

    def attach(self, cut: Callable[[], object]) -> None:
        """There is a stream now, and ``cut`` breaks it off."""
        self._cut = cut
        if self._state is LinkState.CLOSED:
            cut()

    def converse(self, incoming: Iterable[bytes]) -> str:
        """Both sides know each other: go up, and read until the stream ends; the reason of the end."""
        try:
            self._meet(incoming)
            with self._lock:
                if self._state is not LinkState.CONNECTING:
                    return self._end_reason
                self._state = LinkState.UP
            with self._telling:
                self._events.on_up()
            self.sender.flow()
            for frame in incoming:
                self._on_frame(frame)
        except _Ended as end:
            return str(end)
        except CannotMeet as why:
            self._end_cause = Cause.NO_PATH if why.no_path else Cause.LINK_DOWN
            self._hang_up(str(why), incoming, NO_PATH if why.no_path else 0)
            return str(why)
        except FrameError as fault:
            return self._hang_up(f"it broke the rules of the stream: {fault}", incoming)
        except grpc.RpcError as error:
            return _describe_break(error)
        return "the connection ended without a goodbye"

    def _hang_up(self, reason: str, incoming: Iterable[bytes], flags: int = 0) -> str:
        """Tell the peer what it did wrong, and wait until it has read that or has been given up."""
        self._stop_landing()
        self.sender.end(pack_fault(reason, flags))
        cut = self._clerk.later(FLUSH_SECONDS, self._cut_if_open)
        try:
            for _ in incoming:
                pass
        except grpc.RpcError:
            pass
        cut.cancel()
        return f"{self.peer.task} was cut off: {reason}"

    def _on_frame(self, frame: bytes) -> None:
        header, payload = unpack(frame)
        if header.kind == Kind.GOODBYE:
            raise _Ended("closed by the peer")
        if header.kind == Kind.FAULT:
            self._end_cause = Cause.NO_PATH if header.flags & NO_PATH else Cause.LINK_DOWN
            raise _Ended(f"{self.peer.task} cut this end off: {text_of(payload)}")
        self._obey(header, payload)

    def _settle(self, transfer: AnyTransfer) -> None:
        with self._telling:
            with self._lock:
                tell = self._unsettled.pop(transfer.number, None) is not None
            if tell:
                self._events.on_sent(transfer.number)

    def _fail(self, number: TransferId, reason: str) -> None:
        with self._telling:
            with self._lock:
                tell = self._unsettled.pop(number, None) is not None
            if tell:
                self._events.on_failed(number, reason)

    def _finish(self, reason: str) -> None:
        """Settle everything and tell the owner, once."""
        with self._lock:
            lost = self._state in (LinkState.CONNECTING, LinkState.UP)
            if lost:
                self._state = LinkState.LOST
                self._end_reason = reason
            unsettled = list(self._unsettled)
        self._stop_landing()
        self.sender.end()
        try:
            for number in unsettled:
                self._fail(number, self._end_reason)
            if lost:
                with self._telling:
                    self._events.on_lost(Reason(self._end_cause, reason))
        finally:
            self._ended.set()


def _describe_break(error: grpc.RpcError) -> str:
    """A dialer's error says what happened; an acceptor's has no text."""
    details = error.details() if hasattr(error, "details") else None
    return (
        f"the connection ended without a goodbye ({details})" if details else "the connection ended without a goodbye"
    )
