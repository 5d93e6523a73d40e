"""One connection between two tasks: its control stream, its data endpoint, and all their callbacks.

Callbacks are short, and the start of each is recorded: a callback that did not return caused the first of the bug
reports that this program addresses.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lockstep.protocol.core.causes import Cause, Reason, link_down
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.events import Event, LinkLost, LinkUp, Received, TensorKind, TransferEnded, VersionArrived
from lockstep.protocol.core.faults import Callback
from lockstep.protocol.core.ids import BucketId, Incarnation, TaskId, hex64
from lockstep.protocol.core.messages import (
    Envelope,
    GradientNote,
    Heartbeat,
    Hello,
    Holding,
    MeanNote,
    Message,
    Note,
    Printed,
    Report,
    Resolution,
    ResolutionHeld,
    Ticket,
    VersionNote,
)
from lockstep.runtime import phrases
from lockstep.runtime.trace.traffic import Traffic
from lockstep.transports.base import (
    Counters,
    Endpoint,
    LandsOnce,
    LinkDownError,
    Loan,
    Move,
    NoPathError,
    PeerAddress,
    Region,
    ShowsProgress,
    Speaks,
    Transport,
    TransportError,
)
from lockstep.transports.control.codec import WireError, decode, decode_note, encode, encode_note
from lockstep.transports.control.link import ControlLink
from lockstep.transports.registry import moves_by_rdma


class NodeSide(Protocol):
    """What a peer's keeper needs from its own task."""

    task: TaskId
    incarnation: Incarnation
    transport: Transport
    traffic: Traffic

    @property
    def leaving(self) -> bool:
        """The job is over here: no more links are opened."""

    @property
    def forming(self) -> bool:
        """The cluster is not complete yet."""

    def refuse(self, peer: TaskId, reason: str) -> None:
        """The requested transport cannot link these two tasks, now or later."""

    def linked(self, peer: TaskId, path: str) -> None:
        """This task has opened a link over this path."""

    def dials_next_life(self, peer: TaskId) -> bool:
        """Whether another incarnation of this task, after one that was lost, is linked with."""

    def tensors_in(self, bucket: BucketId) -> int:
        """How many tensors, or parts of them, are in a bucket."""

    def words_about(self, peer: TaskId, incarnation: Incarnation) -> list[Word]:
        """What all other tasks know of this incarnation of ``peer``; waits for their answers."""

    def hello(self) -> Hello: ...

    def envelope(self, message: Message) -> Envelope: ...

    def post(self, event: Event) -> None: ...

    def do(self, event: Event) -> None:
        """As ``post``, but on the calling thread if the loop is idle."""

    def lent(self, peer: TaskId, incarnation: Incarnation, note: Note, loan: Loan) -> None:
        """This incarnation of ``peer`` lends what ``note`` names."""

    def report_received(self, peer: TaskId, report: Report | Printed) -> bool:
        """A report has come; False if it is not from the coordinator."""

    @property
    def faults(self) -> Faults | None:
        """The faults that a drill injects here."""


class Faults(Protocol):
    """The injected faults of a link (``runtime/task/injection.py``)."""

    def drops_message(self, peer: TaskId, message: Message) -> bool: ...

    def drops_tensor(self, peer: TaskId, number: int, bucket: int) -> bool: ...

    def in_callback(self, peer: TaskId, callback: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Transfer:
    kind: TensorKind
    number: int
    bucket: BucketId
    since: float = 0.0
    in_place: bool = False
    """Nothing moves: it is over when the reader is done with it, which may take a whole step."""

    def ended(self, peer: TaskId, *, ok: bool) -> TransferEnded:
        return TransferEnded(peer, self.number, self.bucket, self.kind, ok)


UP: Final = "up"
_CONFIRMING = (Holding, ResolutionHeld)
"""What is said in every step, and what others wait for: it goes beside the tensors where that takes less. Each confirms
something, and none depends on what else is said on the control stream."""
_SPOKEN = (*_CONFIRMING, Resolution)
"""All that may come that way: also what its sender lets overtake others."""
_LONGEST_STATES = 4 << 10
"""Bytes of workers' states in a resolution that may be a word; what is longer would be encoded in vain."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """How a link is used. ``path``: the transport; empty where there is none yet."""

    path: str
    state: str
    counters: Counters | None


_Running = tuple[str, float, int]
"""A callback that is running: its name, its start, its thread."""


def _is_short(message: Message) -> bool:
    return isinstance(message, Resolution) and sum(len(one.data) for one in message.states) <= _LONGEST_STATES


class Connection:
    """One connection of a link: its control stream and its endpoint, and all their callbacks."""

    def __init__(
        self,
        node: NodeSide,
        peer: TaskId,
        on_end: Callable[[Connection, Reason], None],
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_open``: the connection may be ready for use now; threads that wait for it should check."""
        self.peer = peer
        self.incarnation: Incarnation = 0
        self.address: PeerAddress | None = None
        self.heard_at = time.monotonic()
        self.link: ControlLink | None = None
        self._endpoint: Endpoint | None = None
        self._speaker: Speaks | None = None
        """The same, if it can speak: to ask whether it can takes longer than to do it."""
        self._node = node
        self._on_end = on_end
        self._on_open = on_open
        self._lock = threading.Lock()
        self._alive = True
        self._up = False
        self._early: list[Event] = []
        """What arrived before the data endpoint was up: the machines receive it after ``LinkUp``."""
        self._answer: Hello | None = None
        self._accepted = False
        self._transfers: dict[int, _Transfer] = {}
        self._tensors = 0
        self._counted = False
        self._callbacks: list[_Running | None] = [None, None]  # of the control stream, of the data endpoint

    @property
    def endpoint(self) -> Endpoint | None:
        return self._endpoint

    @endpoint.setter
    def endpoint(self, endpoint: Endpoint) -> None:
        self._endpoint, self._speaker = endpoint, endpoint if isinstance(endpoint, Speaks) else None

    @property
    def was_up(self) -> bool:
        """Whether it has ever been up, however it ended."""
        return self._up

    @property
    def up(self) -> bool:
        return self._up and self._alive

    @property
    def lends_in_place(self) -> bool:
        return self.endpoint is not None and self.endpoint.lends_in_place

    def grant_once(self, region: Region) -> Ticket | None:
        """A ticket by which each range of this region lands once; None if this link cannot do that."""
        return self.endpoint.grant_once(region) if isinstance(self.endpoint, LandsOnce) else None

    def accept(self, link: ControlLink, hello: Hello) -> None:
        """The peer has dialed us."""
        self.link = link
        self._accepted = True
        self._connect_endpoint(hello, dials=False)

    def attach(self, link: ControlLink) -> None:
        """We have dialed; the answer may have arrived before the caller had the link."""
        with self._lock:
            self.link = link
            answer = self._answer
        if answer is not None:
            self._connect_endpoint(answer, dials=True)

    def _connect_endpoint(self, hello: Hello, dials: bool) -> None:
        self.incarnation = hello.incarnation
        name = self._node.transport.name
        published = next((t.address for t in hello.transports if t.transport == name), None)
        if published is None:
            self.end(link_down(phrases.does_not_speak(name)))
            return
        self.address = PeerAddress(hello.task, hello.incarnation, published)
        try:
            self.endpoint = self._node.transport.connect(self.address, dials, self)
            self._on_open()
        except NoPathError as error:
            # The dialing end refuses. If the other one closed first, this one would dial again without success.
            if dials:
                self._node.refuse(self.peer, str(error))
                self.end(Reason(Cause.NO_PATH, str(error)))
        except TransportError as error:
            self.end(link_down(str(error)))

    # -- control stream --

    def on_open(self, peer: Hello) -> None:
        with self._lock:
            self._answer = peer
            ready = self.link is not None and self.endpoint is None and not self._accepted
        if ready:
            self._connect_endpoint(peer, dials=True)

    def on_message(self, envelope: Envelope) -> None:
        self.heard_at = time.monotonic()
        if isinstance(envelope.message, Heartbeat) or envelope.incarnation != self.incarnation:
            return
        message = envelope.message
        if isinstance(message, Report | Printed) and self._node.report_received(self.peer, message):
            return
        self._enter(0, "a message arrived", Callback.MESSAGE)
        self._post(Received(self.peer, envelope.incarnation, envelope.message))
        self._callbacks[0] = None

    def _enter(self, which: int, name: str, callback: str) -> None:
        """A callback starts. It must return at once; one that does not is found by this record."""
        self._callbacks[which] = (name, self.heard_at, threading.get_ident())
        if self._node.faults is not None:
            self._node.faults.in_callback(self.peer, callback)

    def send(self, message: Message, *, overtakes: bool = False) -> None:
        """``overtakes``: it may arrive before what was sent earlier."""
        if self._node.faults is not None and self._node.faults.drops_message(self.peer, message):
            return
        if (isinstance(message, _CONFIRMING) or (overtakes and _is_short(message))) and self._spoken(message):
            return
        if self.link is not None and self._alive:
            self.link.send(self._node.envelope(message))

    def _spoken(self, message: Message) -> bool:
        """Whether the data endpoint has taken it."""
        speaker = self._speaker
        return speaker is not None and self.up and speaker.say(encode(self._node.envelope(message)))

    # -- data endpoint --

    def on_up(self) -> None:
        with self._lock:
            if not self._alive:
                return
            self._up = True
            self._node.post(LinkUp(self.peer, self.incarnation))
            for event in self._early:
                self._node.post(event)
            self._early.clear()
        self._on_open()

    def on_sent(self, transfer: int) -> None:
        self._transfer_over(transfer, ok=True)

    def on_failed(self, transfer: int, reason: str) -> None:  # noqa: ARG002 - the link's own end carries the reason
        self._transfer_over(transfer, ok=False)

    def _transfer_over(self, transfer: int, ok: bool) -> None:
        with self._lock:
            known = self._transfers.pop(transfer, None)
        if known is not None:
            self._tensors += self._node.tensors_in(known.bucket) if ok else 0
            tell = self._do if ok else self._post  # what failed is retried, and not by the thread that reports it
            tell(known.ended(self.peer, ok=ok))

    def on_arrived(self, note: bytes, nbytes: int) -> None:  # noqa: ARG002 - the endpoint counts bytes
        self.heard_at = time.monotonic()
        self._enter(1, "a tensor arrived", Callback.TENSOR)
        known = self._read_note(note)
        if isinstance(known, VersionNote):
            self._tensors += self._node.tensors_in(known.bucket)
            self._do(VersionArrived(self.peer, known.version, known.bucket))
        self._callbacks[1] = None

    def on_lent(self, note: bytes, loan: Loan) -> None:
        self.heard_at = time.monotonic()
        self._enter(1, "a gradient arrived", Callback.TENSOR)
        known = self._read_note(note)
        self._tensors += 0 if known is None else self._node.tensors_in(known.bucket)
        if known is not None and self._alive:
            self._node.lent(self.peer, self.incarnation, known, loan)
        else:
            loan.release()
        self._callbacks[1] = None

    def on_word(self, word: bytes) -> None:
        self.heard_at = time.monotonic()
        self._enter(1, "a word arrived", Callback.MESSAGE)
        try:
            envelope = decode(word)
            if not isinstance(envelope.message, _SPOKEN):
                raise WireError(f"a {type(envelope.message).__name__} belongs on the control stream")
        except WireError as error:
            self.end(link_down(str(error)))
        else:
            if envelope.incarnation == self.incarnation:
                self._do(Received(self.peer, envelope.incarnation, envelope.message))
        self._callbacks[1] = None

    def _read_note(self, note: bytes) -> Note | None:
        """None: the peer sent something else, and the connection has ended."""
        try:
            return decode_note(note)
        except WireError as error:
            self.end(link_down(str(error)))
            return None

    def on_lost(self, reason: Reason) -> None:
        """One half of the link broke."""
        self.end(reason)

    def write_version(self, note: VersionNote, source: Region, offset: int, nbytes: int, to: Ticket, at: int) -> None:
        """Start sending a parameter bucket."""
        move = Move(source, offset, nbytes, to, at, encode_note(note), note.bucket)
        self._start(_Transfer(TensorKind.VERSION, note.version, note.bucket, time.monotonic()), move)

    def lend_version(self, note: VersionNote, source: Region, offset: int, nbytes: int, to: Ticket, at: int) -> None:
        """Let the worker read a parameter bucket here until it has the next one."""
        move = Move(source, offset, nbytes, to, at, encode_note(note), note.bucket, loan=True)
        lent = _Transfer(TensorKind.VERSION, note.version, note.bucket, time.monotonic(), in_place=self.lends_in_place)
        self._start(lent, move)

    def lend_gradient(self, note: GradientNote, source: Region, offset: int, nbytes: int, to: Ticket, at: int) -> None:
        """Start lending a gradient bucket."""
        move = Move(source, offset, nbytes, to, at, encode_note(note), note.bucket, loan=True)
        self._start(_Transfer(TensorKind.GRADIENT, note.step, note.bucket, time.monotonic()), move)

    def lend_mean(self, note: MeanNote, source: Region, offset: int, nbytes: int, to: Ticket, at: int) -> None:
        """Start handing on the mean of a bucket."""
        move = Move(source, offset, nbytes, to, at, encode_note(note), note.bucket, loan=True)
        self._start(_Transfer(TensorKind.MEAN, note.step, note.bucket, time.monotonic()), move)

    def _start(self, transfer: _Transfer, move: Move) -> None:
        if self.endpoint is None or not self.up:
            self._post(transfer.ended(self.peer, ok=False))
            return
        if self._node.faults is not None and self._node.faults.drops_tensor(
            self.peer, transfer.number, transfer.bucket
        ):
            self._post(transfer.ended(self.peer, ok=True))
            return
        # Buckets are numbered from the last layer to the first, which the next forward needs first: their number is
        # the urgency of the move.
        # The lock keeps the completion, which comes on another thread, from overtaking its own registration.
        # An endpoint that is already down reports its end next, and what is missing is requested again after that.
        with self._lock, contextlib.suppress(LinkDownError):
            self._transfers[self.endpoint.start(move)] = transfer

    # -- what others may ask --

    @property
    def state(self) -> str:
        return UP if self.up else "connecting" if self._alive else "lost"

    def use(self) -> LinkUse:
        """Its path, and what has gone over it, if that is not counted among the ended ones yet."""
        endpoint = self.endpoint
        if endpoint is None:
            return LinkUse("", self.state, None)
        return LinkUse(endpoint.transport, self.state, None if self._counted else endpoint.counters())

    def facts(self, now: float) -> dict[str, Any]:
        """The state of this link, for a snapshot."""
        endpoint = self.endpoint
        counters = None if endpoint is None else endpoint.counters()
        running = max((one for one in self._callbacks if one is not None), key=lambda one: -one[1], default=None)
        with self._lock:
            transfers = [one for one in self._transfers.values() if not one.in_place][:64]
        return {
            "state": self.state,
            "heard": now - self.heard_at,
            "incarnation": hex64(self.incarnation),
            "path": "" if endpoint is None else endpoint.path(),
            "rdma": endpoint is not None and moves_by_rdma(endpoint.transport),
            "sent": 0 if counters is None else counters.bytes_sent,
            "received": 0 if counters is None else counters.bytes_received,
            "moving": [
                {"what": t.kind.value, "step": t.number, "bucket": t.bucket, "seconds": now - t.since}
                for t in transfers
            ],
            "callback": None
            if running is None
            else {"name": running[0], "seconds": now - running[1], "ident": running[2]},
        }

    def bytes_moved(self) -> int:
        """Bytes that have gone over this link, including those of running transfers if the transport counts them."""
        endpoint = self.endpoint
        if endpoint is None:
            return 0
        counters = endpoint.counters()
        under_way = endpoint.bytes_under_way() if isinstance(endpoint, ShowsProgress) else 0
        return counters.bytes_sent + counters.bytes_received + under_way

    # -- the end --

    def _post(self, event: Event) -> None:
        """Pass events to the machines in order: none before the link is up, none after it has ended."""
        with self._lock:
            if self._up and self._alive:
                self._node.post(event)
            elif self._alive:
                self._early.append(event)

    def _do(self, event: Event) -> None:
        """As ``_post``, on the endpoint's thread, which has ended before ``LinkLost`` is posted."""
        with self._lock:
            told = self._up and self._alive
            if self._alive and not told:
                self._early.append(event)
        if told:
            self._node.do(event)

    def end(self, reason: Reason) -> None:
        """End the whole connection, once, for the first reason. ``LinkLost`` follows when it is closed: until then
        bytes may still arrive."""
        with self._lock:
            if not self._alive:
                return
            self._alive = False
        self._on_end(self, reason)

    def bury(self, reason: Reason) -> None:
        """Close both halves, then report that the link is lost, if it was ever up."""
        self.close(0.0)
        if self._up:
            self._node.post(LinkLost(self.peer, reason.text))

    def close(self, flush_seconds: float = 1.0) -> None:
        """Free both halves; must not be called from one of their callbacks."""
        self._alive = False
        # The control stream first: a peer that sees the other half end no longer reads what is left on this one.
        if self.link is not None:
            self.link.close(flush_seconds)
        if self.endpoint is not None:
            self.endpoint.close()
            if not self._counted:
                self._counted = True
                self._node.traffic.add(self.endpoint.transport, self.endpoint.counters(), self._tensors)
