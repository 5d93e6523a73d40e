"""``grpc+tcp`` with ``--require_private``: nothing of a tensor can be read or changed on its way."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from conformance_hosts.hosts import Here
from helpers.keys import make_key
from helpers.line_visitor import LINE_ATTACKS, LineAttack, LineVisitor
from helpers.recorder import Recorder
from helpers.waiting import wait_until
from helpers.wire import PATIENCE
from lockstep.security.certificates import certificates_for
from lockstep.security.key import Key, find_key
from lockstep.security.proof import ProofError, Refusal
from lockstep.security.refusals import REFUSALS, Entrance, RefusalLog
from lockstep.security.tls import PrivateEnds
from lockstep.transports.base import Move, PeerAddress
from lockstep.transports.conformance import CASES, SuiteCase, node, run_case
from lockstep.transports.conformance.node import LocalNode
from lockstep.transports.conformance.stage import Pair, Stage
from lockstep.transports.memory import address_of
from lockstep.transports.registry import encrypted
from lockstep.transports.tcp import transport
from lockstep.transports.tcp.endpoint import PRIVATE
from lockstep.transports.tcp.line import AGAIN
from lockstep.transports.tcp.private_line import PrivateLine
from lockstep.transports.tcp.spreading import Spreading

TCP = "grpc+tcp"
MIB = 1 << 20
WINDOW = 24


def soon() -> float:
    return time.monotonic() + PATIENCE


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("lockstep.transports.meeting.MATCH_SECONDS", 0.2)
    with Stage(encrypted(TCP), Here()) as stage:
        yield stage


def seen_between(name: str) -> tuple[bytes, bytes, str]:
    """A tensor, all that its sender put on the wire, and the path that the link says it takes."""
    with Stage(name, Here()) as stage:
        a, b = stage.node("/suite/a"), stage.node("/suite/b")
        with closing(between(a, b)) as recorder:
            pair = joined(stage, a, b)
            way = pair.way(4 * MIB)
            way.write(0, 4 * MIB, 0, tail=b"a note that is a secret as well")
            way.check(b.log.wait("arrived")[0], 0, 4 * MIB)
            tensor = bytes(a.region(way.source_region).buffer)
            return tensor + b"a note that is a secret as well", bytes(recorder.said), a.path(pair.a_link)


def between(a: LocalNode, b: LocalNode) -> Recorder:
    """Somebody at whose address ``b`` believes to be, so that not even the proof tells them apart."""
    host, _, port = b.address().address.decode().removeprefix(PRIVATE).rpartition(":")
    recorder = Recorder(host, int(port))
    links = b.transport._links  # type: ignore[attr-defined]
    links.address = links.address.replace(port, str(recorder.port))
    return recorder


def joined(stage: Stage, a: LocalNode, b: LocalNode) -> Pair:
    a_link, b_link = stage.join(a, b)
    return Pair(a, a_link, b, b_link)


def test_nothing_of_a_tensor_or_its_note_is_on_the_wire_and_without_the_flag_all_of_it_is() -> None:
    for name, where in ((encrypted(TCP), "encrypted TCP to "), (TCP, "TCP to ")):
        sent, on_the_wire, path = seen_between(name)
        assert path.startswith(where)
        assert len(on_the_wire) > len(sent)
        pieces = [sent[at : at + WINDOW] for at in (0, MIB // 3, 3 * MIB, len(sent) - WINDOW)]
        assert [piece in on_the_wire for piece in pieces] == 4 * [name == TCP]
        assert (b"/suite/a" in on_the_wire) == (name == TCP)


def test_a_bit_that_is_changed_on_the_way_ends_the_link_and_does_not_land(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    with closing(between(a, b)) as recorder:
        pair = joined(stage, a, b)
        way = pair.way(MIB)
        passed = 0

        def flip(part: bytes) -> bytes:
            nonlocal passed
            before, passed = passed, passed + len(part)
            at = MIB // 2 - before
            return part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :] if 0 <= at < len(part) else part

        recorder.change = flip
        way.write(0, MIB, 0)
        assert "without a goodbye" in b.log.wait("lost")[0].text
        a.log.wait("lost")
    assert b.log.all("arrived") == []
    landed, true = b.region(way.target_region).buffer, a.region(way.source_region).buffer
    assert all(mine in (0, its) for mine, its in zip(landed, true, strict=True))


def test_what_came_together_with_a_frame_is_not_left_waiting(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has nothing more to say about it: it has been taken, and waits to be decrypted."""
    pair, begun, go_on, came = stage.pair(), threading.Event(), threading.Event(), list[int]()

    def held(_: object, note: bytes, nbytes: int) -> None:
        begun.set()
        go_on.wait(PATIENCE)
        came.append(nbytes)

    monkeypatch.setattr(node._Owner, "on_arrived", held)
    way, link = pair.way(1000), pair.a.endpoint(pair.a_link)
    sizes = [0, 0, 0, 1000, 0, 0]
    for number, nbytes in enumerate(sizes):
        link.start(Move(pair.a.region(way.source_region), 0, nbytes, way.ticket, 0, b""))
        assert number or begun.wait(PATIENCE)
    wait_until(lambda: pair.a.counters(pair.a_link).writes_sent == len(sizes), PATIENCE, "all are in the kernel")
    go_on.set()
    wait_until(lambda: came == sizes, PATIENCE, "all have arrived")


# --- who is let in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", LINE_ATTACKS)
def test_with_a_certificate_the_proof_is_still_demanded(stage: Stage, attack: LineAttack, tmp_path: Path) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    link = b.connect(a.address(), False)
    assert stage.key is not None
    visitor = LineVisitor(stage.key, a, b, b.address().address.decode())
    refusal = attack(visitor, tmp_path)
    assert refusal == LINE_ATTACKS[attack] or LINE_ATTACKS[attack] in refusal
    assert b.state(link) == "connecting"


def in_plain(address: tuple[str, int], other: Key) -> None:
    with socket.create_connection(address) as line:
        line.sendall((16).to_bytes(4, "little") + b"lockstep proof 1")
        line.recv(100)


def with_another_key(address: tuple[str, int], other: Key) -> None:
    with socket.create_connection(address) as line, pytest.raises(ProofError):
        PrivateEnds(certificates_for(other)).dial(line, soon())


@pytest.mark.parametrize(
    ("stranger", "why"), [(in_plain, Refusal.MALFORMED), (with_another_key, Refusal.OTHER_KEY)], ids=["plain", "key"]
)
def test_a_stranger_is_refused_and_counted(
    stage: Stage, stranger: object, why: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RefusalLog(lambda _: None)
    monkeypatch.setattr(REFUSALS, "note", log.note)
    b = stage.node("/suite/b")
    host, _, port = b.address().address.decode().removeprefix(PRIVATE).rpartition(":")
    assert callable(stranger)
    stranger((host, int(port)), find_key(make_key(tmp_path / "other", 8)))
    said = wait_until(log.summary, PATIENCE, "the refusal is counted")
    assert said is not None
    assert (said["last"]["entrance"], said["last"]["why"]) == (Entrance.TENSORS.value, why.value)
    assert said["callers"] == 1


def other_node(stage: Stage, task: str, key: Key | None, name: str = TCP) -> LocalNode:
    return LocalNode(name, task, 0xB000_0000_0000_0001, key=key)


def test_a_private_end_does_not_dial_one_that_sends_in_the_clear(stage: Stage) -> None:
    a = stage.node("/suite/a")
    with closing(other_node(stage, "/suite/b", stage.key)) as b:
        link = a.connect(b.address(), True)
        assert "--require_private; start all tasks with it" in a.log.wait("lost", link=link)[0].text


def test_one_that_does_not_ask_for_encryption_encrypts_for_a_peer_that_does(stage: Stage) -> None:
    b = stage.node("/suite/b")
    with closing(other_node(stage, "/suite/a", stage.key)) as a:
        pair = joined(stage, a, b)
        way = pair.way(MIB)
        way.write(0, MIB, 0)
        way.check(b.log.wait("arrived")[0], 0, MIB)
        assert all(one.path(0).startswith("encrypted TCP to ") for one in (a, b))


def test_one_without_a_key_is_refused_before_it_dials(stage: Stage) -> None:
    b = stage.node("/suite/b")
    with closing(other_node(stage, "/suite/a", None)) as a:
        link = a.connect(b.address(), True)
        assert "(--insecure)" in a.log.wait("lost", link=link)[0].text


def test_a_squatter_without_a_certificate_learns_no_name(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        address = f"{PRIVATE}127.0.0.1:{squatter.getsockname()[1]}"
        link = a.connect(PeerAddress(b.task, b.incarnation, address.encode()), True)
        visit, _ = squatter.accept()
        with visit:
            assert b"/suite" not in visit.recv(4096)
            visit.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert "is not part of this handshake" in a.log.wait("lost", link=link)[0].text


# --- several connections, and any sizes ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lines", [2, 8])
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
    monkeypatch.setattr(transport.TcpTransport.__init__, "__defaults__", (lines,))
    monkeypatch.setattr(Spreading, "decide", lambda _: True)
    run_case(case, encrypted(TCP), Here())


@pytest.fixture
def lines(stage: Stage) -> Iterator[tuple[PrivateLine, PrivateLine]]:
    """Both ends of a connection whose buffers are small."""
    assert stage.key is not None
    ends, accepted = PrivateEnds(certificates_for(stage.key)), []
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as near:
        far, _ = door.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 30_000)

        def accept() -> None:
            accepted.append(ends.accept(far, soon(), soon(), lambda: None))

        accepting = threading.Thread(target=accept)
        accepting.start()
        dialed = ends.dial(near, soon())
        accepting.join(PATIENCE)
        with far:
            yield PrivateLine(dialed), PrivateLine(accepted[0])


def test_whatever_the_sizes_all_bytes_come_in_their_order(lines: tuple[PrivateLine, PrivateLine]) -> None:
    one, other = lines
    dice = random.Random(1)
    total = 6 * MIB
    sent, came = memoryview(bytearray(dice.randbytes(total))), memoryview(bytearray(total))
    source, target = address_of(sent), address_of(came)
    sent_at = came_at = clogged = empty = 0
    first = second = 0
    while came_at < total:
        if not first + second and sent_at < total:
            first = min(total - sent_at, dice.choice([0, 1, 60, 4000]))
            second = min(total - sent_at - first, dice.choice([0, 1, 5000, 16384, 300_000, 3 * MIB]))
        if first + second:
            moved = one.send(source + sent_at, first, source + sent_at + first, second)
            clogged += moved == AGAIN
            moved = max(0, moved)
            sent_at += moved
            first, second = first - min(first, moved), second - max(0, moved - first)
        sizes = [min(dice.choice([0, 1, 100, 70_000]), total - came_at)]
        sizes.append(min(dice.choice([1, 9000, 16384, MIB]), total - came_at - sizes[0]))
        sizes.append(min(dice.choice([0, 52]), total - came_at - sum(sizes)))
        places = [(target + came_at + sum(sizes[:at]), sizes[at]) for at in range(3)]
        got = other.scatter(places[0], *places[1], places[2])
        empty += got == AGAIN
        came_at += max(0, got)
    assert came == sent
    assert clogged
    assert empty


def all_of(line: PrivateLine, into: memoryview) -> int:
    """How many bytes come before the other end has hung up."""
    came = 0
    with suppress(EOFError):
        while True:
            came += max(0, line.receive(address_of(into[came:]), len(into) - came))
    return came


def test_what_the_kernel_has_not_taken_is_not_told_as_sent(lines: tuple[PrivateLine, PrivateLine]) -> None:
    one, other = lines
    memory = memoryview(bytearray(random.Random(2).randbytes(8 * MIB)))
    told = 0
    while (moved := one.send(0, 0, address_of(memory) + told, len(memory) - told)) != AGAIN:
        told += moved
    one.end_sending()
    into = memoryview(bytearray(8 * MIB))
    came = all_of(other, into)
    assert told <= came < len(memory)
    assert into[:came] == memory[:came]


def test_the_peer_of_a_private_end_sees_that_path_too(stage: Stage) -> None:
    pair = stage.pair()
    for one, link in ((pair.a, pair.a_link), (pair.b, pair.b_link)):
        assert one.path(link).startswith("encrypted TCP to 127.0.0.1:")
        assert one.path(link).endswith(" (4 connections)")
