"""What is special about the data plane ``grpc``: frames, misbehaving peers, matching of streams and endpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance_hosts.hosts import Here
from helpers.wire import PATIENCE
from lockstep.protocol.core.messages import Ticket
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.security.proof import Dialer, Parties
from lockstep.transports import meeting
from lockstep.transports.base import Move, PeerAddress, TransportError
from lockstep.transports.conformance.node import LocalNode, note_for
from lockstep.transports.conformance.stage import Stage
from lockstep.transports.control import codec
from lockstep.transports.control.channels import open_data_channel
from lockstep.transports.control.server import method_path
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grpc.chunks import CHUNK, ChunkedTransfer
from lockstep.transports.landing import FIRST, LAST, LOAN
from lockstep.transports.memory import HostRegion
from lockstep.transports.stream import frames, links
from lockstep.transports.stream.frames import FrameKind, Header, StreamHello
from lockstep.transports.stream.sending import Sender
from lockstep.transports.timers import TimerThread
from lockstep.version import __version__

UNSIGNED = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    kind=st.integers(0, 255),
    flags=st.integers(0, 255),
    note_bytes=st.integers(0, 2**16 - 1),
    transfer=UNSIGNED,
    region=UNSIGNED,
    key=st.binary(min_size=8, max_size=8),
    offset=UNSIGNED,
    total=UNSIGNED,
)


@given(HEADERS, st.binary(max_size=300), st.binary(max_size=300))
def test_a_frame_comes_back_as_it_was(header: Header, first: bytes, second: bytes) -> None:
    back, payload = frames.unpack(frames.pack(header, first, memoryview(second)))
    assert back == header
    assert bytes(payload) == first + second


@given(HEADERS, st.binary(max_size=300))
def test_a_frame_written_by_hand_is_the_data_frame_of_the_contract(header: Header, payload: bytes) -> None:
    frame = frames.pack(header, payload)
    proto = codec._PROTO["DataFrame"].FromString(frame)
    assert proto.payload == payload
    assert len(proto.header) == frames._HEADER.size
    assert proto.header in frame


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(FrameError):
        frames.unpack(data)


@given(HEADERS, st.binary(min_size=1, max_size=50), st.integers(1, 50))
def test_a_frame_that_was_cut_short_is_refused(header: Header, payload: bytes, cut: int) -> None:
    with pytest.raises(FrameError):
        frames.unpack(frames.pack(header, payload)[:-cut])


class RawPeer:
    """Speaks the data stream to a node without our endpoint, so it can break every rule."""

    def __init__(self, node: LocalNode, hello: StreamHello) -> None:
        """Proves that it knows the key of this process."""
        address = node.address().address.decode()
        parties = Parties(
            purpose="Task.Data",
            dialer=hello.task,
            acceptor=node.task,
            version=__version__,
            dialer_life=hello.incarnation,
            acceptor_life=node.incarnation,
            acceptor_address=address,
        )
        key = chosen_key()
        assert key is not None
        dialer = Dialer(key.sub(Purpose.DATA), parties)
        self._more = threading.Semaphore(0)
        self._frames: list[bytes | None] = []
        self._channel = open_data_channel(address)
        self.send(frames.pack_hello(hello._replace(nonce=dialer.nonce)))
        self._answers = self._channel.stream_stream(method_path("Task", "Data"))(self._outgoing())
        proof, _ = dialer.answer(frames.unpack_proof(next(self._answers)))
        self.send(frames.pack(Header(FrameKind.PROOF), proof))

    def _outgoing(self) -> Iterator[bytes]:
        while self._more.acquire(timeout=PATIENCE):
            frame = self._frames.pop(0)
            if frame is None:
                return
            yield frame

    def send(self, frame: bytes | None) -> None:
        self._frames.append(frame)
        self._more.release()

    def answer(self) -> tuple[int, str]:
        """Kind and text of the next frame of the node."""
        header, payload = frames.unpack(next(self._answers))
        return header.kind, frames.text_of(payload)

    def close(self) -> None:
        self.send(None)
        self._channel.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage("grpc", Here()) as stage:
        yield stage


RAW = PeerAddress("/raw", 77, b"127.0.0.1:1")


@contextmanager
def raw_link(node: LocalNode) -> Iterator[tuple[RawPeer, int]]:
    link = node.connect(RAW, False)
    peer = RawPeer(node, StreamHello(RAW.task, RAW.incarnation, node.incarnation))
    assert peer.answer()[0] == FrameKind.HELLO
    node.log.wait("up", link=link)
    try:
        yield peer, link
    finally:
        peer.close()


def chunk(ticket: Ticket, data: bytes, **changes: Any) -> bytes:
    header = Header(kind=CHUNK, flags=FIRST | LAST, transfer=1, region=ticket.region, key=ticket.key, total=len(data))
    return frames.pack(header._replace(**changes), data)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"region": 999}, "region 999 was not granted"),
        ({"key": b"guessed!"}, "was not granted"),
        ({"offset": 60}, "are outside region"),
        ({"offset": 2**64 - 1}, "are outside region"),
        ({"total": 2**63}, "are outside region"),
        ({"total": 4}, "sent more than its 4 bytes"),
        ({"total": 12}, "ended after 8 of 12 bytes"),
        ({"flags": LAST}, "out of order"),
        ({"note_bytes": 9}, "shorter than its note"),
        ({"kind": 99}, "a frame of kind 99"),
        ({"kind": FrameKind.HELLO}, "a frame of kind 1"),
        ({"kind": FrameKind.RELEASE}, "transfer 1 is not a loan"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_cut_off_with_the_reason_and_touches_no_memory(
    stage: Stage, changes: dict[str, Any], reason: str
) -> None:
    node = stage.node("/node")
    region = node.allocate(64)
    node.fill(region, 0, 64, 1)
    before = node.digest(region, 0, 64)
    ticket = node.grant(region, RAW)
    with raw_link(node) as (peer, link):
        peer.send(chunk(ticket, b"12345678", **changes))
        kind, text = peer.answer()
        assert kind == FrameKind.FAULT
        assert reason in text
        assert reason in node.log.wait("lost", link=link)[0].text
    # A transfer that ends too early has landed what it brought; all others must leave memory alone.
    assert reason.startswith("ended after") or node.digest(region, 0, 64) == before
    assert node.log.all("arrived") == []


def test_bytes_that_are_no_frame_end_the_link_with_a_reason(stage: Stage) -> None:
    node = stage.node("/node")
    with raw_link(node) as (peer, link):
        peer.send(b"rubbish")
        assert "a frame has at least" in node.log.wait("lost", link=link)[0].text


def test_a_transfer_given_up_in_the_middle_is_followed_by_another_one(stage: Stage) -> None:
    node = stage.node("/node")
    region = node.allocate(64)
    ticket = node.grant(region, RAW)
    with raw_link(node) as (peer, _):
        peer.send(chunk(ticket, b"12345678", total=16, flags=FIRST))
        note = note_for(region, 8, 8)
        peer.send(chunk(ticket, note + b"abcdefgh", transfer=2, offset=8, total=8, note_bytes=len(note)))
        heard = node.log.wait("arrived")
    assert len(heard) == 1
    assert bytes(node.region(region).buffer[:16]) == b"12345678abcdefgh"


def test_a_loan_of_a_raw_peer_is_released_with_its_number(stage: Stage) -> None:
    node = stage.node("/node")
    ticket = node.grant(node.allocate(64), RAW)
    with raw_link(node) as (peer, _):
        peer.send(chunk(ticket, b"12345678", transfer=42, flags=FIRST | LAST | LOAN))
        node.log.wait("lent")
        node.release(0)
        header, _ = frames.unpack(next(peer._answers))
        assert (header.kind, header.transfer) == (FrameKind.RELEASE, 42)


def test_a_member_that_is_not_expected_is_refused_with_a_reason(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MATCH_SECONDS", 0.2)
    node = stage.node("/node")
    peer = RawPeer(node, StreamHello("/stranger", 5, node.incarnation))
    assert peer.answer() == (FrameKind.FAULT, "/node does not expect /stranger in incarnation 0000000000000005")
    peer.close()


def test_a_second_stream_of_the_same_life_is_refused(stage: Stage) -> None:
    node = stage.node("/node")
    with raw_link(node) as (_, link):
        second = RawPeer(node, StreamHello(RAW.task, RAW.incarnation, node.incarnation))
        assert second.answer() == (FrameKind.FAULT, "/node already has a link with this incarnation of /raw")
        second.close()
        assert node.state(link) == "up"


def test_a_stream_without_a_hello_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "FIRST_SECONDS", 0.2)
    node = stage.node("/node")
    with open_data_channel(node.address().address.decode()) as channel:
        never = threading.Event()

        def say_nothing() -> Iterator[bytes]:
            never.wait(PATIENCE)
            yield from ()

        call = channel.stream_stream(method_path("Task", "Data"))(say_nothing())
        with pytest.raises(grpc.RpcError):
            next(call)
        never.set()


def test_the_dialer_may_come_before_the_acceptor_asks_for_it(stage: Stage) -> None:
    a, b = stage.node("/a"), stage.node("/b")
    a_link = a.connect(b.address(), True)
    assert a.state(a_link) == "connecting"
    b_link = b.connect(a.address(), False)
    a.log.wait("up", link=a_link)
    b.log.wait("up", link=b_link)


def test_writes_before_the_link_is_up_wait_for_it(stage: Stage) -> None:
    a, b = stage.node("/a"), stage.node("/b")
    source, target = a.allocate(100), b.allocate(100)
    a.fill(source, 0, 100, 3)
    ticket = b.grant(target, a.address())
    link = a.connect(b.address(), True)
    a.start(link, source, 0, 100, ticket, 0, note_for(target, 0, 100))
    b.connect(a.address(), False)
    assert b.log.wait("arrived")[0].digest == a.digest(source, 0, 100)


@pytest.mark.parametrize("dials", [True, False])
def test_an_end_whose_peer_never_comes_is_told_so(stage: Stage, monkeypatch: pytest.MonkeyPatch, dials: bool) -> None:
    monkeypatch.setattr(links if dials else meeting, "CONNECT_SECONDS", 0.3)
    a, b = stage.node("/a"), stage.node("/b")
    link = a.connect(b.address(), dials)
    assert "within 0.3 s" in a.log.wait("lost", link=link)[0].text


@pytest.mark.parametrize("dials", [True, False])
def test_closing_an_end_that_waits_for_its_peer_returns_at_once_and_fails_what_is_queued(
    stage: Stage, dials: bool
) -> None:
    a, b = stage.node("/a"), stage.node("/b")
    source = a.allocate(10)
    ticket = b.grant(b.allocate(10), a.address())
    link = a.connect(b.address(), dials)
    transfer = a.start(link, source, 0, 10, ticket, 0, b"n")
    a.close_link(link)
    assert a.log.wait_settled([transfer], seconds=0.1) == {transfer: "failed"}
    assert a.log.all("lost") == []


def test_a_second_link_with_the_same_life_is_the_callers_error(stage: Stage) -> None:
    a, b = stage.node("/a"), stage.node("/b")
    b.connect(a.address(), False)
    with pytest.raises(TransportError, match="already"):
        b.connect(a.address(), False)


def test_a_write_that_waits_behind_others_can_be_taken_back_while_the_peer_is_frozen(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(64 << 20)
    victim.freeze()
    first, second, loan = way.write(0, 64 << 20, 0), way.write(0, 10, 0), way.lend(0, 10, 0)
    for transfer in (first, second, loan):
        pair.a.cancel(pair.a_link, transfer)
    assert set(pair.a.log.wait_settled([first, second, loan]).values()) == {"failed"}


def test_a_closed_transport_makes_no_links(stage: Stage) -> None:
    a, b = stage.node("/a"), stage.node("/b")
    a.transport.close()
    with pytest.raises(TransportError, match="closed"):
        a.connect(b.address(), True)


def test_a_clerk_runs_errands_in_time_and_not_those_taken_back() -> None:
    done: list[str] = []
    finished = threading.Event()
    timers = TimerThread("timers")
    timers.later(0.05, lambda: done.append("later"))
    timers.later(0.01, lambda: done.append("taken back")).cancel()
    timers.soon(lambda: done.append("soon"))
    timers.later(0.1, finished.set)
    assert finished.wait(PATIENCE)
    assert done == ["soon", "later"]
    timers.close()
    timers.close()


def _waiting_transfer(number: int, urgency: int) -> ChunkedTransfer:
    ticket, data = Ticket("grpc", 1, 64, 0, b"12345678"), memoryview(bytearray(8))
    move = Move(HostRegion(1, data, None, lambda _: None), 0, 8, ticket, 0, b"note", urgency)
    return ChunkedTransfer(number, move, data)


def _order_of(sender: Sender[ChunkedTransfer]) -> list[int]:
    sender.flow()
    sent = sender.frames()
    return [frames.unpack(next(sent))[0].transfer for _ in range(len(sender._bulk))]


def test_transfers_that_wait_leave_by_urgency_and_then_in_the_order_of_the_calls() -> None:
    sender: Sender[ChunkedTransfer] = Sender()
    for number, urgency in ((1, 0), (2, 5), (3, 5), (4, 1), (5, 9)):
        sender.add(_waiting_transfer(number, urgency))
    assert _order_of(sender) == [5, 2, 3, 4, 1]


def test_a_transfer_that_has_begun_is_not_overtaken() -> None:
    sender: Sender[ChunkedTransfer] = Sender()
    begun = _waiting_transfer(1, 0)
    begun.begun = 4
    sender.add(begun)
    sender.add(_waiting_transfer(2, 7))
    assert _order_of(sender) == [1, 2]
