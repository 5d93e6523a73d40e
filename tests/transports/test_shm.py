"""What is special about shared memory: who may map it, what is left behind, and that nothing is copied for a loan."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance_hosts.hosts import Here
from lockstep.transports.base import NoPathError, PeerAddress, Speaks, TransportError, loan_ticket
from lockstep.transports.conformance.events import EventLog
from lockstep.transports.conformance.node import LocalNode
from lockstep.transports.conformance.stage import Stage, wait_until
from lockstep.transports.frame_error import FrameError
from lockstep.transports.shm.endpoint import ShmEndpoint
from lockstep.transports.shm.frames import pack_region
from lockstep.transports.shm.host import make_place, unpack_place
from lockstep.transports.shm.memory import map_file
from lockstep.transports.shm.signal_socket import Signals
from lockstep.transports.shm.tokens import make_tokens

MIB = 1 << 20


def other(peer: PeerAddress, **changes: object) -> PeerAddress:
    place = dataclasses.replace(unpack_place(peer.address), **changes)  # type: ignore[arg-type]
    return PeerAddress(peer.task, peer.incarnation, place.pack())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot": "another", "host": "far"}, "runs on another host \\(far, this is "),
        ({"network": "net:[1]"}, "another network namespace"),
    ],
)
def test_a_peer_that_cannot_share_memory_is_refused_with_the_reason(changes: dict[str, str], reason: str) -> None:
    with Stage("grpc+shm") as stage:
        a, b = stage.node("/a"), stage.node("/b")
        with pytest.raises(NoPathError, match=reason):
            a.connect(other(b.address(), **changes), True)


def test_a_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with Stage("grpc+shm") as stage:
        a, b = stage.node("/a"), stage.node("/b")
        with pytest.raises(NoPathError, match="runs as another user \\(1001, this one as 1000\\)"):
            a.connect(other(b.address(), user=1001), True)


def test_an_address_that_is_none_is_refused() -> None:
    with Stage("grpc+shm") as stage:
        a = stage.node("/a")
        for address in (b"", b"[]", b"{}", b"\xff"):
            with pytest.raises(NoPathError, match="did not publish an address for shared memory"):
                a.connect(PeerAddress("/b", 1, address), True)


def test_whoever_does_not_know_the_secret_is_not_let_in() -> None:
    with Stage("grpc+shm") as stage:
        a, b = stage.node("/a"), stage.node("/b")
        b.connect(a.address(), False)
        link = a.connect(other(b.address(), secret="guess"), True)
        assert a.log.wait("lost", link=link)


def test_a_loan_is_read_in_the_lenders_memory() -> None:
    with Stage("grpc+shm") as stage:
        pair = stage.pair()
        region = pair.a.allocate(MIB)
        pair.a.fill(region, 0, MIB, 5)
        pair.a.start(pair.a_link, region, 0, MIB, loan_ticket("grpc+shm", MIB), 0, b"x" * 24, True)
        pair.b.log.wait("lent")
        assert isinstance(pair.b, LocalNode)
        loan = pair.b.loans[0]
        assert bytes(loan.buffer[:64]) == bytes(pair.a.region(region).buffer[:64])
        pair.a.region(region).buffer[:64] = b"!" * 64  # what the lender must not do, and the proof that it is the same
        assert bytes(loan.buffer[:64]) == b"!" * 64
        with pytest.raises(TypeError):
            loan.buffer[0] = 1
        loan.release()


def test_a_loan_can_be_read_after_the_lender_was_killed() -> None:
    with Stage("grpc+shm", Here()) as stage:
        pair, victim = stage.pair_with_victim()
        region = victim.allocate(MIB)
        victim.fill(region, 0, MIB, 5)
        expected = victim.digest(region, 0, MIB)
        victim.start(pair.b_link, region, 0, MIB, loan_ticket("grpc+shm", MIB), 0, b"x" * 24, True)
        pair.a.log.wait("lent")
        victim.kill()
        pair.a.log.wait("lost")
        import zlib

        assert zlib.crc32(pair.a.loans[0].buffer) == expected


def shared_memory_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def test_nothing_is_left_in_shared_memory_after_a_kill() -> None:
    before = shared_memory_files()
    with Stage("grpc+shm", Here()) as stage:
        pair, victim = stage.pair_with_victim()
        way = pair.way_back(8 * MIB)
        way.write(0, 8 * MIB, 0)
        victim.kill()
        pair.a.log.wait("lost")
    assert shared_memory_files() <= before


def test_too_little_memory_is_told_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.transports import memory

    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with Stage("grpc+shm") as stage:
        node = stage.node("/a")
        with pytest.raises(TransportError, match="needs 4096 bytes, this machine has 1000 available"):
            node.transport.allocate(4096, "gradients")


def test_memory_that_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, 4096)
        with pytest.raises(TransportError, match="could shrink"):
            map_file(descriptor, 4096, writable=False)
    finally:
        os.close(descriptor)


def test_frames_after_one_that_breaks_the_rules_leave_no_descriptor_open() -> None:
    with Stage("grpc+shm") as stage:
        pair = stage.pair()
        assert isinstance(pair.b, LocalNode)
        endpoint = pair.b.endpoint(pair.b_link)
        assert isinstance(endpoint, ShmEndpoint)
        unread = os.memfd_create("unread")
        with pytest.raises(FrameError):
            endpoint._on_frames(iter([(b"\xff", []), (pack_region(1, 64), [unread])]))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(unread)


def test_a_frame_without_bytes_leaves_no_descriptor_open() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        signals = Signals(ours)
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [b""], [theirs.fileno()])
        with pytest.raises(EOFError):
            signals.receive()
        assert len(os.listdir("/proc/self/fd")) == before
        signals.close()


def test_a_token_is_taken_once() -> None:
    descriptor, tokens = make_tokens()
    os.close(descriptor)
    tokens.lay_out(3)
    assert tokens.take(3)
    assert not tokens.take(3)
    tokens.lay_out(3)
    assert tokens.take(3)
    tokens.close()


def test_an_idle_link_uses_no_cpu() -> None:
    with Stage("grpc+shm") as stage:
        stage.pair()
        before, began = time.process_time(), time.monotonic()
        with pytest.raises(AssertionError):
            EventLog("nobody").wait("nothing", seconds=0.5)
        assert (time.process_time() - before) / (time.monotonic() - began) < 0.10


def test_a_process_that_ends_in_the_middle_of_the_handshake_does_no_harm() -> None:
    with Stage("grpc+shm") as stage:
        a, b = stage.node("/a"), stage.node("/b")
        door = "\\0lockstep-" + unpack_place(b.address().address).door
        code = (
            "import socket, os, signal\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            f"s.connect('{door}')\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=20)
        assert ended.returncode == -signal.SIGKILL
        stage.join(a, b)


def test_a_place_tells_where_this_process_lives() -> None:
    place = make_place()
    assert unpack_place(place.pack()) == place
    assert place.user == os.getuid()


def test_many_links_end_without_leaving_their_doors() -> None:
    with Stage("grpc+shm") as stage:
        node = stage.node("/a")
        door = unpack_place(node.address().address).door
        assert door in Path("/proc/net/unix").read_text()
        node.close()
        wait_until("the door is gone", lambda: door not in Path("/proc/net/unix").read_text())


@pytest.mark.parametrize("transport", ["grpc+shm", "auto"])
def test_words_come_in_order_and_none_that_is_too_long_is_said(transport: str) -> None:
    with Stage(transport) as stage:
        pair = stage.pair()
        assert isinstance(pair.a, LocalNode)
        endpoint = pair.a.endpoint(pair.a_link)
        assert isinstance(endpoint, Speaks)
        words = [bytes([number]) * (number + 1) for number in range(50)]
        assert all(endpoint.say(word) for word in words)
        assert not endpoint.say(b"x" * (1 << 20))
        assert [heard.note for heard in pair.b.log.wait("word", 50)] == words
        pair.a.endpoint(pair.a_link).close()
        assert not endpoint.say(b"late")
