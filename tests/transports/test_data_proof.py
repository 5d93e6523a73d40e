"""A data stream is opened, and a link replaced, only by whoever proves to be the expected incarnation of a member.

Tensors have a port without TLS, where anybody can connect: only the proof stands between them and a link.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import pytest

from conformance_hosts.hosts import Here
from helpers.stream_visitor import STREAM_ATTACKS, RawStream, StreamAttack, StreamVisitor
from helpers.transports import RUN_HERE
from helpers.waiting import wait_until
from helpers.wire import PATIENCE
from lockstep.transports.base import PeerAddress
from lockstep.transports.conformance.node import LocalNode
from lockstep.transports.conformance.stage import Pair, Stage
from lockstep.transports.control.channels import open_data_channel
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.stream import frames, links
from lockstep.transports.stream.frames import FrameKind, Header

METHODS = {name: method for name, method in (("grpc", "Data"), ("grpc+ucx", "Ucx")) if name in RUN_HERE}


@pytest.fixture(params=METHODS)
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("lockstep.transports.meeting.MATCH_SECONDS", 0.2)
    with Stage(request.param, Here()) as stage:
        yield stage


def adversary_of(stage: Stage, a: LocalNode, b: LocalNode) -> StreamVisitor:
    assert stage.key is not None
    return StreamVisitor(stage.key, a, b, b.address().address.decode(), METHODS[stage.transport])


def bytes_arrive(pair: Pair) -> None:
    way = pair.way(1000)
    way.write(0, 1000, 0)
    way.check(pair.b.log.wait("arrived")[0], 0, 1000)


@pytest.mark.parametrize("attack", STREAM_ATTACKS)
def test_an_expected_link_is_not_taken_by_somebody_else(stage: Stage, attack: StreamAttack, tmp_path: Path) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    b_link = b.connect(a.address(), False)
    refusal = attack(adversary_of(stage, a, b), tmp_path)
    assert refusal == STREAM_ATTACKS[attack] or STREAM_ATTACKS[attack] in refusal
    assert b.state(b_link) == "connecting"
    a_link = a.connect(b.address(), True)
    a.log.wait("up", link=a_link)
    b.log.wait("up", link=b_link)
    bytes_arrive(Pair(a, a_link, b, b_link))


@pytest.mark.parametrize("attack", STREAM_ATTACKS)
def test_a_live_link_goes_on(stage: Stage, attack: StreamAttack, tmp_path: Path) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    pair = Pair(a, *_reordered(stage.join(a, b), b))
    refusal = attack(adversary_of(stage, a, b), tmp_path)
    assert refusal == STREAM_ATTACKS[attack] or STREAM_ATTACKS[attack] in refusal
    assert pair.b.log.all("lost") == []
    bytes_arrive(pair)


def _reordered(joined: tuple[int, int], b: LocalNode) -> tuple[int, LocalNode, int]:
    return joined[0], b, joined[1]


def test_a_squatter_at_the_port_of_a_peer_learns_nothing_and_is_refused(stage: Stage) -> None:
    """It answers in the name of the peer; the dialer sends a nonce and no proof."""
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    said: list[bytes] = []

    def squat(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        said.append(next(incoming))
        yield frames.pack(Header(FrameKind.PROOF), bytes(64))
        with suppress(grpc.RpcError):
            said.extend(incoming)

    squatter = ControlServer("127.0.0.1", 0, threads=4)
    squatter.add_handlers("Task", {METHODS[stage.transport]: grpc.stream_stream_rpc_method_handler(squat)})
    squatter.start()
    try:
        link = a.connect(PeerAddress(b.task, b.incarnation, squatter.address.encode()), True)
        assert "does not know this job's key" in a.log.wait("lost", link=link)[0].text
    finally:
        squatter.stop(0)
    assert len(said) == 1


def test_a_relay_at_another_address_does_not_get_between_two_members(stage: Stage) -> None:
    """It passes every frame on unchanged, but the address that was dialed is part of the proof."""
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    method = METHODS[stage.transport]
    b_link = b.connect(a.address(), False)

    def relay(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with open_data_channel(b.address().address.decode()) as channel, suppress(grpc.RpcError):
            yield from channel.stream_stream(method_path("Task", method))(incoming)

    between = ControlServer("127.0.0.1", 0, threads=4)
    between.add_handlers("Task", {method: grpc.stream_stream_rpc_method_handler(relay)})
    between.start()
    try:
        link = a.connect(PeerAddress(b.task, b.incarnation, between.address.encode()), True)
        a.log.wait("lost", link=link)
    finally:
        between.stop(0)
    assert b.state(b_link) == "connecting"


def test_silent_streams_leave_room_for_members(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "FIRST_SECONDS", 2 * PATIENCE)  # none goes by itself
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    with ExitStack() as silent:
        streams = [
            silent.enter_context(closing(RawStream(b.address().address.decode(), METHODS[stage.transport])))
            for _ in range(3 * links.STRANGERS)
        ]
        cut = 2 * links.STRANGERS
        wait_until(lambda: sum(not stream.is_open() for stream in streams) == cut, PATIENCE, "those too many are cut")
        bytes_arrive(Pair(a, *_reordered(stage.join(a, b), b)))


def test_a_stream_that_does_not_finish_its_proof_is_cut(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HELLO_SECONDS", 0.2)
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    adversary = adversary_of(stage, a, b)
    with adversary.open() as stream:
        stream.send(frames.pack_hello(adversary.hello()))
        frames.unpack_proof(stream.answer())
        with pytest.raises(grpc.RpcError):
            stream.answer()


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
    bytes_arrive(Pair(a, *_reordered(stage.join(a, b), b)))
