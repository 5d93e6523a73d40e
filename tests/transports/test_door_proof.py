"""The door of shared memory: whoever does not prove to be the expected member gets nothing and leaves nothing."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from helpers.door_visitor import DOOR_ATTACKS, DoorAttack, DoorVisitor, refusal_at
from helpers.other_user import NOBODY, needs_root
from helpers.waiting import wait_until
from helpers.wire import PATIENCE
from lockstep.security.proof import Refusal
from lockstep.transports.base import NoPathError, PeerAddress
from lockstep.transports.conformance.node import LocalNode
from lockstep.transports.conformance.stage import Pair, Stage
from lockstep.transports.shm import listener
from lockstep.transports.shm.frames import (
    SignalKind,
)
from lockstep.transports.shm.host import door_address, unpack_place


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage("grpc+shm") as stage:
        yield stage


def visitor_of(stage: Stage, a: LocalNode, b: LocalNode, folder: Path) -> DoorVisitor:
    return DoorVisitor(stage.key, a, b, unpack_place(b.address().address), folder)


def bytes_arrive(pair: Pair) -> None:
    way = pair.way(1000)
    way.write(0, 1000, 0)
    way.check(pair.b.log.wait("arrived")[0], 0, 1000)


@pytest.mark.parametrize("attack", DOOR_ATTACKS)
def test_whoever_does_not_prove_itself_is_not_let_in_and_the_member_is(
    stage: Stage, attack: DoorAttack, tmp_path: Path
) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    link = b.connect(a.address(), False)
    assert attack(visitor_of(stage, a, b, tmp_path)) == DOOR_ATTACKS[attack]
    assert b.state(link) == "connecting"
    a_link = a.connect(b.address(), True)
    b.log.wait("up", link=link)
    assert attack(visitor_of(stage, a, b, tmp_path)) == DOOR_ATTACKS[attack]  # and a live link goes on
    bytes_arrive(Pair(a, a_link, b, link))
    assert b.log.all("lost") == []


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "noise",
    [
        bytes([SignalKind.HELLO]) + b"[" * 4000,
        bytes([SignalKind.HELLO]) + b"{}",
        bytes([SignalKind.CLAIM]) + b"[" * 4000,
        bytes([SignalKind.OFFER]) + bytes(100),
        b"\xff",
    ],
)
def test_sixty_visits_with_descriptors_leave_none_behind(stage: Stage, noise: bytes, tmp_path: Path) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    visitor = visitor_of(stage, a, b, tmp_path)
    before = open_descriptors()
    for _ in range(60):
        with visitor.knock() as knocking:
            socket.send_fds(knocking, [noise], [0, 1, 2, 0])
            assert refusal_at(knocking) is Refusal.MALFORMED
    wait_until(lambda: open_descriptors() <= before, PATIENCE, "no descriptor is left")
    stage.join(a, b)


def test_silent_visitors_leave_room_for_members(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.transports.shm.handshake.FIRST_SECONDS", 2 * PATIENCE)  # none goes by itself
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    visitor = visitor_of(stage, a, b, tmp_path)
    with ExitStack() as silent:
        knocking = [silent.enter_context(visitor.knock()) for _ in range(3 * listener.STRANGERS)]
        cut = 2 * listener.STRANGERS

        def answered() -> list[socket.socket]:
            return select.select(knocking, [], [], 0)[0]

        # Each has a thread of its own: which of them came last is not the order in which they knocked.
        wait_until(lambda: len(answered()) == cut, PATIENCE, "those too many are sent away")
        assert {refusal_at(one) for one in answered()} <= {Refusal.CROWDED, "closed"}
        stage.join(a, b)


def test_a_visitor_that_says_nothing_is_sent_away_in_time(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.transports.shm.handshake.FIRST_SECONDS", 0.1)
    visitor = visitor_of(stage, stage.node("/suite/a"), stage.node("/suite/b"), tmp_path)
    with visitor.knock() as knocking:
        assert knocking.recv(4096)[:1] == bytes([SignalKind.FAULT])
        assert knocking.recv(4096) == b""


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as taken, open("/dev/null") as null:
        resource.setrlimit(resource.RLIMIT_NOFILE, (null.fileno() + 50, hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(null.fileno()))
        yield


def test_the_door_survives_a_time_without_free_descriptors(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[OSError] = []
    accept = listener.SignalListener._accept_one

    def watched(self: listener.SignalListener) -> None:
        try:
            accept(self)
        except OSError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(listener.SignalListener, "_accept_one", watched)
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    visitor = visitor_of(stage, a, b, tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
        knocking.settimeout(PATIENCE)
        with no_free_descriptor():
            knocking.connect(door_address(visitor.place))
            wait_until(lambda: len(failed) > 1, PATIENCE, "the door has tried twice")
        knocking.send(b"\xff")
        assert refusal_at(knocking) is Refusal.MALFORMED
    stage.join(a, b)


@needs_root
def test_another_user_is_refused_even_by_root(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    door = "\\0" + door_address(unpack_place(b.address().address))[1:].decode()
    code = (
        f"import os, socket; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); knocking.settimeout(20)\n"
        f"knocking.connect('{door}'); print(knocking.recv(4096)[1:].decode())\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=30)
    assert f"belongs to another user ({NOBODY})" in done.stdout, done.stderr
    stage.join(a, b)


def test_a_peer_of_another_user_has_no_path_even_for_root(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    for ours, theirs in ((0, 1001), (1001, 0)):
        mine = json.loads(a.address().address) | {"user": ours}
        a.transport._place = unpack_place(json.dumps(mine).encode())  # type: ignore[attr-defined]
        place = json.loads(b.address().address) | {"user": theirs}
        with pytest.raises(NoPathError, match="runs as another user"):
            a.connect(PeerAddress(b.task, b.incarnation, json.dumps(place).encode()), True)


def test_one_end_with_a_key_and_one_without_refuse_each_other(stage: Stage) -> None:
    a = stage.node("/suite/a")
    stage.key = None
    b = stage.node("/suite/b")
    for dialer, acceptor in ((a, b), (b, a)):
        acceptor.connect(dialer.address(), False)
        link = dialer.connect(acceptor.address(), True)
        assert "(--insecure)" in dialer.log.wait("lost", link=link)[0].text


def test_without_a_key_the_secret_of_the_door_still_counts(stage: Stage) -> None:
    stage.key = None
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    place = json.loads(b.address().address) | {"secret": "guess"}
    b.connect(a.address(), False)
    link = a.connect(PeerAddress(b.task, b.incarnation, json.dumps(place).encode()), True)
    a.log.wait("lost", link=link)
    bytes_arrive(stage.pair())
