"""What is special about ``grpc+tcp``: who is let in, several connections a link, and who sends."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count, pairwise
from pathlib import Path

import pytest

from conformance_hosts.hosts import Here
from helpers.line_visitor import LINE_ATTACKS, LineAttack, LineVisitor, hear, say
from helpers.waiting import wait_until
from helpers.wire import PATIENCE
from lockstep.protocol.core.messages import Ticket
from lockstep.security.proof import Parties, ProofError, Refusal
from lockstep.security.strangers import PLACES
from lockstep.security.wire import Claim, ProvenSocket
from lockstep.transports.base import (
    LandsOnce,
    Move,
    NoPathError,
    PeerAddress,
    TransportError,
)
from lockstep.transports.conformance import CASES, SuiteCase, run_case
from lockstep.transports.conformance.node import LocalNode
from lockstep.transports.conformance.stage import Pair, Stage
from lockstep.transports.frame_error import FrameError
from lockstep.transports.grants import Grants
from lockstep.transports.landing import FIRST, LAST
from lockstep.transports.memory import HostRegion
from lockstep.transports.tcp import frames, line, transport
from lockstep.transports.tcp.frames import ChunkHead, LineFrame, shares, unpack_head
from lockstep.transports.tcp.opening import LineLinks, read_purpose
from lockstep.transports.tcp.receiving import LineLanding
from lockstep.transports.tcp.spreading import FAST, RATES_KEPT, HeldUp, Spreading, held_up, network_limits

MIB = 1 << 20


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("lockstep.transports.meeting.MATCH_SECONDS", 0.2)
    with Stage("grpc+tcp", Here()) as stage:
        yield stage


def visitor_of(stage: Stage, a: LocalNode, b: LocalNode) -> LineVisitor:
    assert stage.key is not None
    return LineVisitor(stage.key, a, b, b.address().address.decode())


def bytes_arrive(pair: Pair, nbytes: int = 1000) -> None:
    way = pair.way(nbytes)
    way.write(0, nbytes, 0)
    way.check(pair.b.log.wait("arrived")[0], 0, nbytes)


@pytest.mark.parametrize("attack", LINE_ATTACKS)
def test_whoever_does_not_prove_itself_is_not_let_in_and_the_member_is(
    stage: Stage, attack: LineAttack, tmp_path: Path
) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    link = b.connect(a.address(), False)
    refusal = attack(visitor_of(stage, a, b), tmp_path)
    assert refusal == LINE_ATTACKS[attack] or LINE_ATTACKS[attack] in refusal
    assert b.state(link) == "connecting"
    a_link = a.connect(b.address(), True)
    b.log.wait("up", link=link)
    refusal = attack(visitor_of(stage, a, b), tmp_path)  # and a live link goes on
    assert refusal == LINE_ATTACKS[attack] or LINE_ATTACKS[attack] in refusal
    bytes_arrive(Pair(a, a_link, b, link))
    assert b.log.all("lost") == []


def test_a_squatter_at_the_port_of_a_peer_learns_nothing_and_is_refused(stage: Stage) -> None:
    """It answers in the name of the peer; the dialer sends a nonce and no proof."""
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        address = f"127.0.0.1:{squatter.getsockname()[1]}"
        link = a.connect(PeerAddress(b.task, b.incarnation, address.encode()), True)
        visit, _ = squatter.accept()
        with visit:
            assert hear(visit)
            say(visit, b"O" + bytes(64))
            assert "does not know this job's key" in a.log.wait("lost", link=link)[0].text
            assert hear(visit) == b""


def test_a_relay_at_another_address_does_not_get_between_two_members(stage: Stage) -> None:
    """It passes everything on unchanged, but the address that was dialed is part of the proof."""
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    b_link = b.connect(a.address(), False)

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(65536):
                target.sendall(part)
            target.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as relay:
        address = f"127.0.0.1:{relay.getsockname()[1]}"
        link = a.connect(PeerAddress(b.task, b.incarnation, address.encode()), True)
        near, _ = relay.accept()
        host, _, port = b.address().address.decode().rpartition(":")
        with near, socket.create_connection((host, int(port))) as far:
            pumps = [threading.Thread(target=pump, args=ends) for ends in ((near, far), (far, near))]
            for one in pumps:
                one.start()
            a.log.wait("lost", link=link)
            for one in pumps:
                one.join(PATIENCE)
    assert b.state(b_link) == "connecting"


def test_silent_visitors_leave_room_for_members(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    visitor = visitor_of(stage, a, b)
    with ExitStack() as silent:
        for _ in range(3 * PLACES):
            silent.enter_context(visitor.open())
        bytes_arrive(Pair(a, *_with(b, stage.join(a, b))))


def _with(b: LocalNode, joined: tuple[int, int]) -> tuple[int, LocalNode, int]:
    return joined[0], b, joined[1]


def test_a_member_that_is_hung_up_on_to_make_room_dials_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    believed, refused = LineLinks._believed, iter((True, False, True, True))

    def crowded_out(links: LineLinks, claim: Claim) -> Parties:
        if next(refused, False):
            raise ProofError(Refusal.CROWDED)
        return believed(links, claim)

    monkeypatch.setattr(LineLinks, "_believed", crowded_out)
    bytes_arrive(stage.pair())


def test_one_end_with_a_key_and_one_without_refuse_each_other(stage: Stage) -> None:
    a = stage.node("/suite/a")
    stage.key = None
    b = stage.node("/suite/b")
    for dialer, acceptor in ((a, b), (b, a)):
        acceptor.connect(dialer.address(), False)
        link = dialer.connect(acceptor.address(), True)
        assert "(--insecure)" in dialer.log.wait("lost", link=link)[0].text


def test_two_ends_without_a_key_meet(stage: Stage) -> None:
    stage.key = None
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    bytes_arrive(Pair(a, *_with(b, stage.join(a, b))))


def test_an_address_that_is_none_is_no_path(stage: Stage) -> None:
    with pytest.raises(NoPathError, match="cannot be read"):
        stage.node("/suite/a").connect(PeerAddress("/suite/b", 1, b"\xff nowhere"), True)


# --- several connections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [2, 3, 8])
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name.startswith(("sixty_four", "tiny", "many_in", "transfers_cancelled", "what_was", "a_late_write"))
    ],
    ids=lambda case: case.name,
)
def test_with_several_connections_the_rules_hold_too(
    case: SuiteCase, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all of them are always used. Of the two ends, only the one that dials decides how many there are."""
    monkeypatch.setattr(transport.TcpTransport.__init__, "__defaults__", (lines,))
    monkeypatch.setattr(Spreading, "decide", lambda _: True)
    run_case(case, "grpc+tcp", Here())


def test_a_link_says_how_many_connections_it_has(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.TcpTransport.__init__, "__defaults__", (3,))
    pair = stage.pair()
    for node, link in ((pair.a, pair.a_link), (pair.b, pair.b_link)):
        assert node.path(link).endswith(" (3 connections)")


def test_connections_are_told_apart_whatever_the_order_in_which_they_come(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in, last_came = LineLinks._let_in, threading.Event()

    def backwards(links: LineLinks, proven: ProvenSocket) -> None:
        assert proven.claim is not None
        place = read_purpose(proven.claim.purpose).place
        if place == 1:
            last_came.wait(PATIENCE)
        let_in(links, proven)
        if place == 2:
            last_came.set()

    monkeypatch.setattr(LineLinks, "_let_in", backwards)
    monkeypatch.setattr(transport.TcpTransport.__init__, "__defaults__", (3,))
    monkeypatch.setattr(Spreading, "decide", lambda _: True)
    bytes_arrive(stage.pair(), 8 * MIB)


def test_connections_beyond_the_limit_are_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.TcpTransport.__init__, "__defaults__", (frames.MAX_LINES + 1,))
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    b.connect(a.address(), False)
    link = a.connect(b.address(), True)
    assert "refuse" in a.log.wait("lost", link=link)[0].text


BEFORE = HeldUp(0, 0, 0)


@pytest.mark.parametrize(
    ("after", "limits"),
    [
        (HeldUp(1_000_000, 0, 0), True),
        (HeldUp(1_000_000, 20_000, 20_000), True),
        (HeldUp(600_000, 0, 0), False),
        (HeldUp(1_000_000, 500_000, 0), False),
        (HeldUp(1_000_000, 0, 500_000), False),
    ],
)
def test_the_network_limits_what_is_always_on_its_way_and_waits_for_neither_end(after: HeldUp, limits: bool) -> None:
    assert network_limits(BEFORE, after, 1.0) is limits


def test_all_connections_are_used_while_the_network_holds_the_first_one_up_and_only_then() -> None:
    now, busy, paused = 0.0, 0, 0.0
    spreading = Spreading(lambda: HeldUp(busy, 0, 0), lambda: now)
    assert not spreading.decide()
    now, busy = 0.2, 200_000
    assert spreading.decide()
    spreading.pause()
    paused = now = 10.0  # in which there was nothing to send
    assert spreading.decide()
    now, busy = paused + 0.2, 400_000
    assert spreading.decide()
    now, busy = now + 0.2, busy + 50_000
    assert not spreading.decide()


def test_one_connection_that_has_been_as_fast_as_a_processor_stays_alone() -> None:
    """On a busy machine something is always on its way, too, and most of what the kernel measures is slow."""
    rates = iter([0, FAST, *(RATES_KEPT - 1) * [FAST // 10], FAST // 10])
    times = iter(range(RATES_KEPT + 2))
    seen = count()
    spreading = Spreading(lambda: HeldUp(next(seen) * 1_000_000, 0, 0, next(rates)), lambda: float(next(times)))
    assert not any(spreading.decide() for _ in range(RATES_KEPT + 1))
    assert spreading.decide(), "that was long ago"


def test_where_the_kernel_does_not_count_one_connection_does_everything() -> None:
    times = iter(range(10))
    spreading = Spreading(lambda: None, lambda: float(next(times)))
    assert not any(spreading.decide() for _ in range(9))


def test_the_kernel_counts_what_holds_up_a_connection(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as dialer:
        accepted, _ = door.accept()
        with accepted:
            assert held_up(dialer) == HeldUp(0, 0, 0)
            dialer.setblocking(False)
            with suppress(BlockingIOError):
                while dialer.send(bytes(MIB)):
                    pass
            first = held_up(dialer)
            wait_until(lambda: held_up(dialer) != first, PATIENCE, "it is held up by the receiver, which reads nothing")
            counted = held_up(dialer)
            assert counted is not None
            assert counted.busy >= counted.by_receiver > 0
            assert counted.rate > 0
    one, other = socket.socketpair()
    with one, other:
        assert held_up(one) is None


@pytest.mark.parametrize("nbytes", [1, 5, 4096, MIB + 1, 4 * MIB])
@pytest.mark.parametrize("lines", [1, 2, 3, 8])
def test_shares_cover_a_chunk_without_gaps(nbytes: int, lines: int) -> None:
    spread = shares(nbytes, lines)
    assert len(spread) == lines
    assert spread[0][0] == 0
    assert spread[-1][1] == nbytes
    assert all(one[1] == other[0] for one, other in pairwise(spread))


# --- frames -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        ChunkHead(0),
        ChunkHead(5),
        ChunkHead(LineFrame.CHUNK, note_bytes=5000),
        ChunkHead(LineFrame.CHUNK, nbytes=frames.CHUNK_BYTES + 1),
        ChunkHead(LineFrame.RELEASE, nbytes=1),
    ],
)
def test_a_head_that_breaks_the_rules_is_refused(head: ChunkHead) -> None:
    with pytest.raises(FrameError):
        unpack_head(frames.HEAD.pack(*head))
    with pytest.raises(FrameError):
        unpack_head(frames.HEAD.pack(*ChunkHead(LineFrame.GOODBYE))[:-1])


# --- who sends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [63, 65])
def test_a_transfer_of_one_chunk_with_other_bytes_than_it_says_is_refused_before_any_lands(total: int) -> None:
    grants, peer = Grants(), PeerAddress("/suite/a", 1, b"")
    ticket = grants.give("grpc+tcp", HostRegion(1, memoryview(bytearray(4096)), None, grants.withdraw), peer)
    head = ChunkHead(LineFrame.CHUNK, FIRST | LAST, 0, 64, 1, ticket.region, ticket.key, total=total)
    landing = LineLanding(grants, peer)
    with pytest.raises(FrameError, match=f"64 of {total} bytes"):
        landing.whole(head, head.nbytes)
    with pytest.raises(FrameError, match="was not granted"):
        landing.whole(head._replace(total=64, key=bytes(8)), head.nbytes)
    assert landing.whole(head._replace(total=64), head.nbytes).region.number == ticket.region


def test_a_small_call_gives_up_the_interpreter_while_a_large_one_has_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits in the kernel for the large one, whose thread would then wait for the interpreter's lock."""
    used: list[str] = []

    def spied(name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        def spy(*_: int) -> int:
            used.append(name)
            meanwhile()
            return 1

        monkeypatch.setattr(line, name, spy)

    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as near:
        one = line.Line(near)
        spied("_SEND_LARGE", meanwhile=lambda: one.receive(0, 8))
        spied("_SCATTER_LARGE", meanwhile=lambda: one.send(0, 0, 0, 8))
        for name in ("_RECEIVE_LARGE", "_RECEIVE_SMALL", "_SEND_SMALL"):
            spied(name)
        one.send(0, 0, 0, MIB)
        assert used == ["_SEND_LARGE", "_RECEIVE_LARGE"]
        used.clear()
        one.scatter((0, 0), 0, MIB, (0, 0))
        assert used[:2] == ["_SCATTER_LARGE", "_SEND_LARGE"]
        used.clear()
        one.send(0, 0, 0, 8)
        one.receive(0, 8)
        assert used == ["_SEND_SMALL", "_RECEIVE_SMALL"]


def test_a_small_tensor_has_left_when_start_returns(stage: Stage) -> None:
    """On the thread that has the event: it needs no other thread of this process."""
    pair, victim = stage.pair_with_victim()
    way = pair.way(64 << 10)
    victim.freeze()
    way.write(0, 64 << 10, 0)
    assert pair.a.counters(pair.a_link).bytes_sent == 64 << 10
    victim.resume()
    way.check(pair.b.log.wait("arrived")[0], 0, 64 << 10)


def test_what_is_told_as_sent_is_told_soon_even_if_the_peer_is_silent(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(1000)
    victim.freeze()
    transfer = way.write(0, 1000, 0)
    assert pair.a.log.wait_settled([transfer], seconds=5.0) == {transfer: "sent"}
    victim.resume()


def test_no_more_than_a_part_of_a_large_one_is_sent_by_the_thread_that_starts_it(stage: Stage) -> None:
    """It may have something else to do; and what the peer does not take must not hold it up."""
    pair, _ = stage.pair_with_victim()
    way = pair.way(64 * MIB)
    way.write(0, 64 * MIB, 0)
    assert pair.a.counters(pair.a_link).bytes_sent == 0
    way.check(pair.b.log.wait("arrived")[0], 0, 64 * MIB)
    wait_until(lambda: pair.a.counters(pair.a_link).bytes_sent == 64 * MIB, PATIENCE, "all of it is counted")


def _write_with(pair: Pair, ticket: Ticket, region: int, nbytes: int, note: bytes) -> None:
    pair.a.endpoint(pair.a_link).start(Move(pair.a.region(region), 0, nbytes, ticket, 0, note))


@pytest.mark.parametrize("nbytes", [1000, 9 * MIB])
@pytest.mark.parametrize("lines", [1, 4])
def test_what_has_landed_once_is_thrown_away_until_it_is_granted_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, nbytes: int, lines: int
) -> None:
    monkeypatch.setattr(transport, "LINES", lines)
    monkeypatch.setattr(Spreading, "decide", lambda _self: True)
    pair = stage.pair()
    assert isinstance(pair.b, LocalNode)
    other_end = pair.b.endpoint(pair.b_link)
    assert isinstance(other_end, LandsOnce)
    source, target = pair.a.allocate(nbytes), pair.b.allocate(nbytes)
    note, landed = bytes(24), pair.b.region(target).buffer

    def arrives(ticket: Ticket, value: int) -> None:
        before = len(pair.b.log.all("arrived"))
        pair.a.region(source).buffer[:] = bytes([value]) * nbytes
        _write_with(pair, ticket, source, nbytes, note)
        pair.b.log.wait("arrived", before + 1)
        assert landed == bytes([value]) * nbytes

    first = other_end.grant_once(pair.b.region(target))
    assert first is not None
    arrives(first, 1)
    pair.a.region(source).buffer[:] = bytes([2]) * nbytes
    _write_with(pair, first, source, nbytes, note)  # once more: thrown away
    again = other_end.grant_once(pair.b.region(target))
    assert again is not None
    _write_with(pair, first, source, nbytes, note)  # and by a ticket from before
    arrives(again, 3)
    assert len(pair.b.log.all("arrived")) == 2
    assert pair.b.log.all("lost") == []
    with suppress(TransportError):
        _write_with(pair, dataclasses.replace(again, key=bytes(8)), source, nbytes, note)
    assert "was not granted" in pair.a.log.wait("lost")[0].text


def test_what_lands_once_cannot_be_lent(stage: Stage) -> None:
    pair = stage.pair()
    assert isinstance(pair.b, LocalNode)
    other_end = pair.b.endpoint(pair.b_link)
    assert isinstance(other_end, LandsOnce)
    source, target = pair.a.allocate(64), pair.b.allocate(64)
    ticket = other_end.grant_once(pair.b.region(target))
    assert ticket is not None
    pair.a.endpoint(pair.a_link).start(Move(pair.a.region(source), 0, 64, ticket, 0, b"", loan=True))
    assert "cannot be lent" in pair.a.log.wait("lost")[0].text
