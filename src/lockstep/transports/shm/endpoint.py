"""One end of a ``grpc+shm`` link.

One thread serves it: it receives the peer's signals, makes the copies of incoming writes, and makes every callback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from lockstep.protocol.core.causes import link_down
from lockstep.transports.base import EndpointEvents, LinkState, Move, PeerAddress, TransferId, TransportError
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants
from lockstep.transports.lifecycle import Lifecycle
from lockstep.transports.loan import HeldLoan
from lockstep.transports.memory import check_move
from lockstep.transports.shm.frames import (
    LOAN,
    MAX_WORD_BYTES,
    Offer,
    SignalKind,
    pack_fault,
    pack_number,
    pack_word,
    text_of,
    unpack_number,
    unpack_offer,
)
from lockstep.transports.shm.memory import SharedRegion
from lockstep.transports.shm.receiving import OfferLanding
from lockstep.transports.shm.sending import SendQueue, SharedTransfer, copy_source
from lockstep.transports.shm.signal_socket import Frame, Signals, close_descriptors
from lockstep.transports.shm.tokens import Tokens

NAME: Final = "grpc+shm"
CLOSE_SECONDS: Final = 5.0
"""How long ``close`` waits for a callback or part of a copy that is in progress."""


class _Ended(Exception):  # noqa: N818  # not an error: how receiving stops
    """Why no more signals are received; the text is the phrase for ``on_lost``."""


class Connected:
    """What the two ends have agreed on: the socket, and the peer's tokens."""

    def __init__(self, signals: Signals, peer_tokens: Tokens) -> None:
        self.signals = signals
        self.peer_tokens = peer_tokens


class ShmEndpoint:
    """Moves ranges of regions to one incarnation of one peer. ``run`` is called on the endpoint's own thread."""

    def __init__(
        self,
        peer: PeerAddress,
        grants: Grants,
        events: EndpointEvents,
        tokens: Tokens,
        stage: Callable[[int], SharedRegion],
    ) -> None:
        """``stage`` makes a region for the copy of a source that the peer cannot map."""
        self.peer = peer
        self._events = events
        self._stage = stage
        self._cycle = Lifecycle(peer.task)
        self._lock = self._cycle.lock  # the desk
        self._desk = SendQueue(tokens)
        self._landing = OfferLanding(grants, peer)
        self._jobs: deque[Callable[[], None]] = deque()
        self._signals: Signals | None = None
        self.attach = self._cycle.attach
        self.counters = self._cycle.counters

    def __repr__(self) -> str:
        return f"<ShmEndpoint to {self.peer.task} {self.state.value}>"

    @property
    def state(self) -> LinkState:
        return self._cycle.state

    @property
    def transport(self) -> str:
        return NAME

    @property
    def lends_in_place(self) -> bool:
        return True

    def path(self) -> str:
        return "shared memory"

    def start(self, move: Move) -> TransferId:
        """``urgency`` is ignored: a loan waits for nothing."""
        source = check_move(NAME, move)
        with self._lock:
            self._cycle.refuse_if_over()
            transfer = SharedTransfer(next(self._cycle.numbers), move, source)
            must_pump = self._desk.add(transfer)
        if must_pump:
            self._do_soon(self._pump)
        return transfer.number

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            known = self._desk.unsettled.get(transfer)
            taken_back = known is not None and self._desk.give_up(known)
        if taken_back:
            self._do_soon(lambda: self._tell_failed(transfer, "cancelled"))

    def say(self, word: bytes) -> bool:
        signals = self._signals
        if signals is None or self.state is not LinkState.UP or len(word) > MAX_WORD_BYTES:
            return False
        signals.send(pack_word(word))
        return True

    def bytes_under_way(self) -> int:
        return self._landing.landed

    def forget(self, region: int) -> None:
        """A region of this task is closed."""
        with self._lock:
            self._desk.forget(region)

    def close(self) -> None:
        self._cycle.close()
        self._cycle.interrupt()
        if not self._cycle.on_own_thread:
            self._cycle.ended.wait(CLOSE_SECONDS)

    # --- the course of the link, on the endpoint's thread ---------------------------------------------------

    def run(self, talk: Callable[[], str]) -> None:
        """Serve the link: ``talk`` connects, exchanges frames, and returns the reason for the end."""
        self._cycle.run(talk, self._finish)

    def _do_soon(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._cycle.interrupt()

    def converse(self, connected: Connected) -> str:
        """Both ends have proven themselves: receive signals until the link ends; returns the reason for the end."""
        self._signals = signals = connected.signals
        self._peer_tokens = connected.peer_tokens
        if not self._cycle.go_up():
            return self._cycle.reason
        self._events.on_up()
        with self._lock:
            self._desk.open(signals)
        self._pump()
        try:
            while self.state is LinkState.UP:
                self._on_frames(iter(signals.receive()))
                self._do_jobs()
        except _Ended as end:
            return str(end)
        except EOFError:
            return "the connection ended without a goodbye"
        except FrameError as fault:
            signals.send(pack_fault(str(fault)))
            return f"{self.peer.task} was cut off because it broke the rules of the link: {fault}"
        return self._cycle.reason

    def _do_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def _on_frames(self, frames: Iterator[Frame]) -> None:
        try:
            for frame in frames:
                self._on_frame(frame)
        finally:
            for unread in frames:  # those after one that broke the rules, or said goodbye
                close_descriptors(unread)

    def _on_frame(self, frame: Frame) -> None:
        if self.state is not LinkState.UP:
            close_descriptors(frame)
            return
        data, descriptors = frame
        try:
            self._obey(data, descriptors)
        finally:
            close_descriptors(frame)

    def _obey(self, data: bytes, descriptors: list[int]) -> None:
        kind = data[0]
        if kind == SignalKind.OFFER:
            self._on_offer(unpack_offer(data))
        elif kind in (SignalKind.DONE, SignalKind.DROPPED):
            self._on_answer(unpack_number(data), delivered=kind == SignalKind.DONE)
        elif kind == SignalKind.WORD:
            self._events.on_word(data[1:])
        elif kind == SignalKind.REGION:
            self._landing.learn(data, descriptors)
        elif kind == SignalKind.FORGET:
            self._landing.forget(unpack_number(data))
        elif kind == SignalKind.GOODBYE:
            raise _Ended("closed by the peer")
        elif kind == SignalKind.FAULT:
            raise _Ended(f"{self.peer.task} cut this end off: {text_of(data)}")
        else:
            raise FrameError(f"a frame of kind {kind} does not belong here")

    def _on_offer(self, offer: Offer) -> None:
        signals = self._signals
        assert signals is not None
        loan = bool(offer.flags & LOAN)
        if loan:
            view = self._landing.view(offer)
        elif not self._landing.copy(offer, lambda: self.state is LinkState.UP):
            return
        if signals.peer_is_gone():
            raise EOFError  # offers of a dead peer are no longer taken
        if not self._peer_tokens.take(offer.token):
            signals.send(pack_number(SignalKind.DROPPED, offer.transfer))
            return
        self._cycle.count_received(offer.nbytes, loan)
        done = pack_number(SignalKind.DONE, offer.transfer)
        if loan:
            self._events.on_lent(offer.note, HeldLoan(view, lambda: signals.send(done)))
        else:
            self._events.on_arrived(offer.note, offer.nbytes)
            signals.send(done)

    def _on_answer(self, number: TransferId, *, delivered: bool) -> None:
        with self._lock:
            transfer = self._desk.answered(number)
        if transfer is None:
            raise FrameError(f"transfer {number} was answered but is not open")
        if delivered == transfer.given_up:
            raise FrameError(f"transfer {number} was decided twice")
        if delivered:
            self._tell_sent(transfer)
        self._pump()

    def _pump(self) -> None:
        """Offer waiting transfers. Sources that cannot be mapped are copied here, one at a time."""
        while True:
            with self._lock:
                transfer = self._desk.pump()
            if transfer is None:
                return
            try:
                copy = self._stage(transfer.move.nbytes)
            except TransportError as error:
                with self._lock:
                    taken_back = self._desk.give_up(transfer)
                if taken_back:
                    self._tell_failed(transfer.number, str(error))
                continue
            copy_source(transfer, copy)
            with self._lock:
                transfer.copied = copy
                if transfer.number not in self._desk.unsettled:  # cancelled meanwhile
                    self._desk.let_go(transfer)

    def _tell_sent(self, transfer: SharedTransfer) -> None:
        self._cycle.count_sent(transfer.move.nbytes, transfer.move.loan)
        self._events.on_sent(transfer.number)

    def _tell_failed(self, number: TransferId, reason: str) -> None:
        self._events.on_failed(number, reason)

    def _finish(self, reason: str) -> None:
        """Settle everything and notify the owner, once."""
        lost = self._cycle.lose(reason)
        self._landing.close()
        try:
            self._do_jobs()
            self._settle_all()
            if lost:
                self._events.on_lost(link_down(reason))
        finally:
            if self._signals is not None:
                self._signals.send(bytes([SignalKind.GOODBYE]))
                self.attach(lambda: None)
                self._signals.close()
                self._peer_tokens.close()
            with self._lock:
                self._desk.close()
            self._cycle.ended.set()

    def _settle_all(self) -> None:
        """Decide for each transfer that the peer has not answered: it was delivered, or it is given up now."""
        with self._lock:
            fates = []
            for transfer in list(self._desk.unsettled.values()):
                told = transfer.given_up
                given_up = self._desk.give_up(transfer)
                fates.append((transfer, told, given_up or transfer.move.loan))
                self._desk.let_go(transfer)
            self._desk.unsettled.clear()
        for transfer, told, failed in fates:
            if told:
                continue
            if failed:
                self._tell_failed(transfer.number, self._cycle.reason)
            else:
                self._tell_sent(transfer)
