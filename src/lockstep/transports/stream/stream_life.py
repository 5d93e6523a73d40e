"""What all endpoints on a gRPC stream share: they go up, exchange frames, end, and settle each transfer exactly once.

How bytes move, and which further frames that takes, is up to the transports that build on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.timing import CUT_SECONDS, FLUSH_SECONDS
from lockstep.transports.base import EndpointEvents, LinkState, Move, PeerAddress, TransferId
from lockstep.transports.frame_error import FrameError
from lockstep.transports.lifecycle import Lifecycle
from lockstep.transports.loan import HeldLoan
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.stream.frames import NO_PATH, FrameKind, Header, pack, pack_fault, text_of, unpack
from lockstep.transports.stream.sending import Sender
from lockstep.transports.timers import TimerThread


class CannotMeet(Exception):  # noqa: N818  # not an error of either end: there is no path between them
    """The two ends cannot reach each other as this transport needs it; the text says what was tried.

    ``no_path``: this is certain, and trying again changes nothing.
    """

    def __init__(self, text: str, *, no_path: bool = False) -> None:
        super().__init__(text)
        self.no_path = no_path


class _Ended(Exception):  # noqa: N818  # not an error: how reading stops
    """Why no more frames are read; the text is the phrase for ``on_lost``."""


class Unsettled(Protocol):
    """A transfer whose end has not been reported to the owner."""

    @property
    def number(self) -> TransferId: ...

    @property
    def move(self) -> Move: ...

    @property
    def left(self) -> bool:
        """Whether all of its bytes have left."""


AnyTransfer = TypeVar("AnyTransfer", bound=Unsettled)


class StreamLife(Generic[AnyTransfer]):
    """One end of a link. The transport calls ``run`` on the endpoint's own thread."""

    def __init__(self, peer: PeerAddress, events: EndpointEvents, timers: TimerThread, sender: Sender[Any]) -> None:
        self.peer = peer
        self.sender = sender
        self._events = events
        self._timers = timers
        self._cycle = Lifecycle(peer.task)
        self._lock = self._cycle.lock  # unsettled transfers
        self._telling = threading.RLock()  # one callback at a time, and none after close
        self._unsettled: dict[TransferId, AnyTransfer] = {}
        self._end_cause = Cause.LINK_DOWN
        self.attach = self._cycle.attach
        self.counters = self._cycle.counters

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.peer.task} {self.state.value}>"

    @property
    def state(self) -> LinkState:
        return self._cycle.state

    # --- what a transport adds ------------------------------------------------------------------------------

    def _meet(self, incoming: Iterable[bytes]) -> None:
        """Before the link is up: send the peer what it needs to know. FrameError and CannotMeet end the link."""

    def _obey(self, header: Header, payload: memoryview) -> None:
        """A frame of the peer, of a kind that only this transport knows. FrameError ends the link."""
        raise NotImplementedError

    def _stop_landing(self) -> None:
        """Once this has returned, no bytes of the peer land in memory any more."""
        raise NotImplementedError

    # --- the course of the link ---------------------------------------------------------------------------------

    def close(self) -> None:
        before = self._cycle.close()
        self._stop_landing()
        self.sender.end(pack(Header(FrameKind.GOODBYE)))
        if before is LinkState.CONNECTING:
            self._cycle.interrupt()
        if self._cycle.on_own_thread:
            self._timers.later(FLUSH_SECONDS, self._cut_if_open)
            return
        if not self._cycle.ended.wait(FLUSH_SECONDS):
            self._cycle.interrupt()
            self._cycle.ended.wait(CUT_SECONDS)
        with self._telling:  # a callback that was in progress has returned now
            pass

    def _cut_if_open(self) -> None:
        if not self._cycle.ended.is_set():
            self._cycle.interrupt()

    def run(self, talk: Callable[[], str]) -> None:
        """Serve the link: ``talk`` connects, reads to the end and returns the reason for the end."""
        self._cycle.run(talk, self._finish)

    def converse(self, incoming: Iterable[bytes]) -> str:
        """Both sides know each other: go up, and read until the stream ends; returns the reason for the end."""
        try:
            self._meet(incoming)
            if not self._cycle.go_up():
                return self._cycle.reason
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
        """Send the peer the rule that it broke, and wait until it has read that, or give up."""
        self._stop_landing()
        self.sender.end(pack_fault(reason, flags))
        cut = self._timers.later(FLUSH_SECONDS, self._cut_if_open)
        try:
            for _ in incoming:
                pass
        except grpc.RpcError:
            pass
        cut.cancel()
        return f"{self.peer.task} was cut off: {reason}"

    def _on_frame(self, frame: bytes) -> None:
        header, payload = unpack(frame)
        if header.kind == FrameKind.GOODBYE:
            raise _Ended("closed by the peer")
        if header.kind == FrameKind.FAULT:
            self._end_cause = Cause.NO_PATH if header.flags & NO_PATH else Cause.LINK_DOWN
            raise _Ended(f"{self.peer.task} cut this end off: {text_of(payload)}")
        if header.kind == FrameKind.RELEASE:
            self._on_release(header.transfer)
        else:
            self._obey(header, payload)

    # --- transfers ----------------------------------------------------------------------------------------------

    def _deliver(self, number: TransferId, note: bytes, nbytes: int, lent: memoryview | None) -> None:
        """A transfer of the peer is in place; ``lent``: it is a loan, of these bytes."""
        with self._telling:
            if self.state is not LinkState.UP:
                return
            self._cycle.count_received(nbytes, lent is not None)
            if lent is None:
                self._events.on_arrived(note, nbytes)
                return
            frame = pack(Header(FrameKind.RELEASE, transfer=number))
            self._events.on_lent(note, HeldLoan(lent, lambda: self.sender.add_urgent(frame)))

    def _on_release(self, number: TransferId) -> None:
        with self._lock:
            transfer = self._unsettled.get(number)
        if transfer is None or not transfer.move.loan or not transfer.left:
            raise FrameError(f"transfer {number} is not a loan that can be released")
        self._settle(transfer)

    def _on_left(self, transfer: AnyTransfer) -> None:
        """All bytes of a transfer have left; on the thread that sends."""
        self._cycle.count_sent(transfer.move.nbytes, transfer.move.loan)
        if not transfer.move.loan:
            self._settle(transfer)

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
        """Settle everything and notify the owner, once."""
        lost = self._cycle.lose(reason)
        with self._lock:
            unsettled = list(self._unsettled)
        self._stop_landing()
        self.sender.end()
        try:
            for number in unsettled:
                self._fail(number, self._cycle.reason)
            if lost:
                with self._telling:
                    self._events.on_lost(Reason(self._end_cause, reason))
        finally:
            self._cycle.ended.set()


def _describe_break(error: grpc.RpcError) -> str:
    """A dialer's error says what happened; an acceptor's has no text."""
    details = error.details() if hasattr(error, "details") else None
    return (
        f"the connection ended without a goodbye ({details})" if details else "the connection ended without a goodbye"
    )
