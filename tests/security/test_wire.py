"""The proof over real sockets: who is refused, with which value, and how little a stranger can hold."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from helpers.waiting import wait_until
from lockstep.security import wire
from lockstep.security.proof import Parties, ProofError, Refusal, pack_fields
from lockstep.security.strangers import Strangers
from lockstep.security.wire import Claim, ProvenSocket, accept, dial

KEY, OTHER = b"k" * 32, b"o" * 32
ME = Parties(purpose="test", dialer="/a", acceptor="/b", version="1", dialer_life=5, acceptor_life=7)


def believed(claim: Claim) -> Parties:
    return Parties(
        purpose="test",
        dialer=claim.dialer,
        acceptor="/b",
        version="1",
        dialer_life=claim.dialer_life,
        acceptor_life=7,
    )


def soon() -> float:
    return time.monotonic() + 10.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


Accepting = Future[tuple[Claim, ProvenSocket]]


def refusal_in(act: Callable[[], object]) -> Refusal:
    with pytest.raises(ProofError) as refused:
        act()
    return refused.value.refusal


@pytest.mark.parametrize("key", [KEY, None])
def test_two_ends_that_agree_exchange_messages(
    ends: tuple[socket.socket, socket.socket], beside: ThreadPoolExecutor, key: bytes | None
) -> None:
    accepting: Accepting = beside.submit(accept, ends[1], key, believed)
    there = dial(ends[0], key, ME, soon())
    claim, here = accepting.result()
    assert claim == Claim("test", "/a", 5, "1")
    for sender, receiver in ((there, here), (here, there)):
        sender.send(b"a message", soon())
        assert receiver.receive(100, soon()) == b"a message"


@pytest.mark.parametrize(
    ("key", "parties", "at_the_dialer", "at_the_acceptor"),
    [
        (OTHER, ME, Refusal.OTHER_KEY, Refusal.CLOSED),
        (None, ME, Refusal.NO_KEY_HERE, Refusal.NO_KEY_THERE),
        (KEY, Parties(purpose="test", dialer="/a", acceptor="/b", version="2"), *[Refusal.OTHER_VERSION] * 2),
        (KEY, Parties(purpose="else", dialer="/a", acceptor="/b", version="1"), *[Refusal.OTHER_TARGET] * 2),
        (KEY, Parties(purpose="test", dialer="/a", acceptor="/c", version="1"), Refusal.OTHER_KEY, Refusal.CLOSED),
    ],
)
def test_an_end_that_does_not_agree_is_refused_with_a_value_at_both_ends(
    ends: tuple[socket.socket, socket.socket],
    beside: ThreadPoolExecutor,
    key: bytes | None,
    parties: Parties,
    at_the_dialer: Refusal,
    at_the_acceptor: Refusal,
) -> None:
    accepting: Accepting = beside.submit(accept, ends[1], KEY, believed)
    assert refusal_in(lambda: dial(ends[0], key, parties, soon())) is at_the_dialer
    ends[0].close()
    assert refusal_in(accepting.result) is at_the_acceptor


def test_an_acceptor_without_a_key_is_refused_by_a_dialer_with_one(
    ends: tuple[socket.socket, socket.socket], beside: ThreadPoolExecutor
) -> None:
    accepting: Accepting = beside.submit(accept, ends[1], None, believed)
    assert refusal_in(lambda: dial(ends[0], KEY, ME, soon())) is Refusal.NO_KEY_THERE
    assert refusal_in(accepting.result) is Refusal.NO_KEY_HERE


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b""),
        framed(b"[" * 16000),
        framed(pack_fields([b"lockstep proof 1", *[b"x"] * 5])),
        framed(pack_fields([b"lockstep proof 1", b"\xff", b"/a", bytes(8), b"1", bytes(32)])),
        struct.pack("<I", wire.FIRST_BYTES + 1),
        b"\xff" * 100,
    ],
)
def test_noise_is_refused_at_once(
    ends: tuple[socket.socket, socket.socket], beside: ThreadPoolExecutor, noise: bytes
) -> None:
    accepting: Accepting = beside.submit(accept, ends[1], KEY, believed)
    ends[0].sendall(noise)
    assert refusal_in(accepting.result) is Refusal.MALFORMED


def test_one_byte_now_and_then_does_not_extend_the_deadline(
    ends: tuple[socket.socket, socket.socket], beside: ThreadPoolExecutor
) -> None:
    accepting: Accepting = beside.submit(accept, ends[1], KEY, believed, 0.3)
    drip = framed(b"x" * 1000)

    def next_byte() -> bool:
        nonlocal drip
        if not accepting.done():
            ends[0].sendall(drip[:1])
            drip = drip[1:]
        return accepting.done()

    wait_until(next_byte, 5.0, "the acceptor gives up")
    assert refusal_in(accepting.result) is Refusal.LATE


def relay(one: socket.socket, other: socket.socket, alter: int) -> None:
    """Pass messages on in both directions in turn, and change one bit of message number ``alter``."""
    source, target = one, other
    for number in range(4):
        message = bytearray(wire._receive(source, 1 << 20, soon()))
        if number == alter:
            message[-1] ^= 1
        target.sendall(framed(bytes(message)))
        if number < 2:
            source, target = target, source


@pytest.mark.parametrize("alter", [0, 1, 2, 3])
def test_a_relay_that_changes_any_message_is_noticed(beside: ThreadPoolExecutor, alter: int) -> None:
    one, one_end = socket.socketpair()
    other, other_end = socket.socketpair()
    with one, one_end, other, other_end:
        accepting: Accepting = beside.submit(accept, other, KEY, believed, 2.0)
        between = beside.submit(relay, one_end, other_end, alter)

        def talk() -> None:
            try:
                dial(one, KEY, ME, soon()).send(b"a message", soon())
            finally:
                one.shutdown(socket.SHUT_WR)

        talking = beside.submit(talk)

        def listen() -> None:
            _, proven = accepting.result()
            assert proven.receive(100, soon()) != b"a message"

        def both() -> None:
            listen()
            talking.result()

        with pytest.raises(ProofError):
            both()
        for each in (one_end, other_end):
            each.shutdown(socket.SHUT_RDWR)
        talking.exception()
        between.exception()


def test_a_stranger_that_has_spoken_is_cut_after_the_silent_ones() -> None:
    strangers = Strangers(places=2)
    cut: list[int] = []
    speaks, silent, later, last = (strangers.place(lambda number=number: cut.append(number)) for number in range(4))  # type: ignore[misc]
    speaks.__enter__().spoke()
    silent.__enter__()
    later.__enter__().spoke()
    assert cut == [1]
    last.__enter__()
    assert cut == [1, 0]
    for kept in (later, last):
        kept.__exit__(None, None, None)
    for evicted in (speaks, silent):
        with pytest.raises(ProofError):
            evicted.__exit__(None, None, None)


def test_strangers_never_hold_more_than_their_places_and_the_latest_get_in() -> None:
    strangers = Strangers(places=4)
    cut: list[int] = []
    inside, leave = threading.Semaphore(0), threading.Event()
    ended: list[tuple[int, Refusal]] = []

    def wait(number: int) -> None:
        gone = threading.Event()

        def end() -> None:
            cut.append(number)
            gone.set()

        try:
            with strangers.place(end):
                inside.release()
                wait_until(lambda: gone.is_set() or leave.is_set(), 10.0, "the stranger leaves")
        except ProofError as error:
            ended.append((number, error.refusal))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(7)]
    for thread in threads:
        thread.start()
        assert inside.acquire(timeout=10)
    assert cut == [0, 1, 2]
    leave.set()
    for thread in threads:
        thread.join(10)
    assert sorted(ended) == [(number, Refusal.CROWDED) for number in range(3)]
