"""Strangers at rank 0's address, and somebody between a rank and rank 0: the ranks find each other all the same."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from helpers.ports import free_port
from helpers.refused_callers import wait_for_refusal
from helpers.waiting import wait_until
from lockstep.runtime.startup.rendezvous import RendezvousError, RendezvousSpec, meet
from lockstep.security import strangers
from lockstep.security.refusals import Entrance
from lockstep.transports.control.addresses import Address

KEY, OTHER = b"k" * 32, b"o" * 32
LIST = ("127.0.0.1:4000", "127.0.0.1:4001")


def spec(rank: int, port: int, key: bytes | None = KEY) -> RendezvousSpec:
    return RendezvousSpec(rank=rank, world=2, address=Address("127.0.0.1", port), timeout=20.0, version="1", key=key)


Met = Future[tuple[str, ...]]


class Rank0:
    """Waits for rank 1 on another thread."""

    def __init__(self) -> None:
        self.port = free_port()
        self._beside = ThreadPoolExecutor()
        self.met: Met = self._beside.submit(meet, spec(0, self.port), 4000, lambda _: None)
        self.connect().close()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        def attempt() -> socket.socket | None:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=(source, 0))
            except ConnectionRefusedError:
                return None

        connected = wait_until(attempt, 10.0, "rank 0 listens")
        assert connected is not None
        return connected

    def guest(self, port: int | None = None, key: bytes | None = KEY) -> Met:
        """Rank 1, at another port if something is in between."""
        wanted = spec(1, self.port, key)
        if port is not None:
            wanted = spec(1, port, key)
        return self._beside.submit(meet, wanted, 4001, lambda _: None)

    def check(self) -> None:
        """Whatever came before, the right one is let in."""
        assert self.guest().result(20) == LIST
        assert self.met.result(20) == LIST

    def close(self) -> None:
        self._beside.shutdown()


@pytest.fixture
def rank_0() -> Iterator[Rank0]:
    rank_0 = Rank0()
    yield rank_0
    rank_0.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"[" * 200000 + b"\n",
        b'{"rank": 1, "world": 2, "port": 6, "version": "1", "token": ""}\n',
        struct.pack("<I", 1 << 31) + b"x",
        struct.pack("<I", 5) + b"hello",
        b"\0" * 1000,
    ],
)
def test_noise_is_refused_and_nothing_happens(rank_0: Rank0, noise: bytes) -> None:
    with rank_0.connect() as stranger:
        try:
            stranger.sendall(noise)
            while stranger.recv(65536):
                pass
        except OSError:
            pass  # it was cut off while it was still sending
    rank_0.check()


def test_another_key_gets_neither_a_place_nor_the_list(rank_0: Rank0) -> None:
    with pytest.raises(RendezvousError, match="does not know this job's key"):
        rank_0.guest(key=OTHER).result(20)
    with pytest.raises(RendezvousError, match="wants a key"):
        rank_0.guest(key=None).result(20)
    wait_for_refusal(Entrance.RENDEZVOUS, "127.0.0.1", "no key there")
    rank_0.check()


def test_visitors_that_say_nothing_or_one_byte_now_and_then_hold_up_nobody(rank_0: Rank0) -> None:
    with ExitStack() as held:
        for number in range(3 * strangers.PLACES):
            stranger = held.enter_context(rank_0.connect())
            stranger.sendall(b"\x10\0" if number % 2 else b"")
        rank_0.check()


def frames_from(source: socket.socket) -> Iterator[bytes]:
    """Messages with their length in front, until the other end hangs up, whether or not it has read everything."""
    with suppress(ConnectionResetError):
        while header := source.recv(4, socket.MSG_WAITALL):
            yield source.recv(struct.unpack("<I", header)[0], socket.MSG_WAITALL)


Change = Callable[[int, bytes], bytes]


@contextmanager
def relay(rank_0: Rank0, change: Change, source: str = "127.0.0.1") -> Iterator[tuple[list[bytes], Met]]:
    """Somebody between rank 1 and rank 0, at the port that rank 1 dials, who may change what rank 1 sends."""
    said: list[bytes] = []
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.2", rank_0.port)) as listener, ExitStack() as opened:

        def pump(one: socket.socket, other: socket.socket, alter: Change) -> None:
            try:
                for number, frame in enumerate(frames_from(one)):
                    frame = alter(number, frame)
                    other.sendall(struct.pack("<I", len(frame)) + frame)
                other.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        def noted(number: int, frame: bytes) -> bytes:
            said.append(frame)
            return change(number, frame)

        def run() -> None:
            near = opened.enter_context(listener.accept()[0])
            far = opened.enter_context(rank_0.connect(source))
            for ends in ((near, far, noted), (far, near, lambda _, frame: frame)):
                threads.append(threading.Thread(target=pump, args=ends))
                threads[-1].start()

        runner = threading.Thread(target=run)
        runner.start()
        wanted = RendezvousSpec(
            rank=1, world=2, address=Address("127.0.0.2", rank_0.port), timeout=2.0, version="1", key=KEY
        )
        yield said, rank_0._beside.submit(meet, wanted, 4001, lambda _: None)
        runner.join(10)
        for thread in threads:
            thread.join(10)


def test_a_relay_that_changes_a_message_of_rank_1_is_noticed(rank_0: Rank0) -> None:
    def change(number: int, frame: bytes) -> bytes:
        return frame.replace(b"4001", b"6666") if number == 2 else frame

    with relay(rank_0, change) as (said, guest):
        with pytest.raises(RendezvousError):
            guest.result(20)
        assert b"4001" in said[2]
    rank_0.check()


def test_a_relay_that_changes_nothing_is_named_by_its_address(rank_0: Rank0) -> None:
    named = pytest.raises(RendezvousError, match=r"comes from 127\.0\.0\.3: something on the way replaces addresses")
    with relay(rank_0, lambda _, frame: frame, "127.0.0.3") as (_, guest), named:
        guest.result(20)
    rank_0.check()


def test_what_a_member_said_once_is_worth_nothing_the_second_time(rank_0: Rank0) -> None:
    noise = pytest.raises(RendezvousError)
    with relay(rank_0, lambda number, frame: frame if number < 2 else b"x" * 40) as (said, guest), noise:
        guest.result(20)
    with rank_0.connect() as stranger:
        for frame in said[:2]:
            stranger.sendall(struct.pack("<I", len(frame)) + frame)
        answers = [frame[:1] for frame in frames_from(stranger)]
        assert answers == [b"O", b"R"]
    rank_0.check()


def test_a_squatter_at_the_address_of_rank_0_gets_no_proof_and_gives_no_list() -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter, ThreadPoolExecutor() as beside:
        port = squatter.getsockname()[1]
        guest: Met = beside.submit(meet, spec(1, port), 4001, lambda _: None)
        connection, _ = squatter.accept()
        with connection:
            frames = frames_from(connection)
            next(frames)
            forged = b"O" + bytes(64)
            connection.sendall(struct.pack("<I", len(forged)) + forged)
            listed = json.dumps({"hosts": ["6.6.6.6:6"] * 2}).encode()
            connection.sendall(struct.pack("<I", len(listed)) + listed)
            with pytest.raises(RendezvousError, match="not of the same job"):
                guest.result(20)
            assert list(frames) == []


def test_a_silent_squatter_is_named_when_the_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        address = Address("127.0.0.1", squatter.getsockname()[1])
        wanted = RendezvousSpec(rank=1, world=2, address=address, timeout=0.5, version="1", key=KEY)
        with pytest.raises(RendezvousError, match=r"could not reach rank 0 .* did not prove in time"):
            meet(wanted, 4001, lambda _: None)
