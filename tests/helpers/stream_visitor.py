"""Somebody at the port for tensors, where only the proof stands between a caller and a link."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import pytest

from helpers.keys import make_key
from lockstep.security.key import Key, Purpose, find_key
from lockstep.security.proof import NONCE_BYTES, Dialer, Parties, ProofError, Refusal
from lockstep.transports.control.channels import open_data_channel
from lockstep.transports.control.server import method_path
from lockstep.transports.frame_error import FrameError
from lockstep.transports.stream import frames
from lockstep.transports.stream.frames import FrameKind, Header, StreamHello
from lockstep.version import __version__


class RawStream:
    """A data stream by hand."""

    def __init__(self, address: str, method: str) -> None:
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = open_data_channel(address)
        self._answers = self._channel.stream_stream(method_path("Task", method))(iter(self._frames.get, None))
        self.send = self._frames.put

    def answer(self) -> bytes:
        return bytes(next(self._answers))

    def is_open(self) -> bool:
        return bool(self._answers.is_active())

    def close(self) -> None:
        self.send(None)
        self._answers.cancel()
        self._channel.close()


class Living(Protocol):
    """One incarnation of a task."""

    @property
    def task(self) -> str: ...

    @property
    def incarnation(self) -> int: ...


class StreamVisitor:
    """Tries to take the place of one task at the data streams of another, with everything but what an attack lacks."""

    def __init__(self, key: Key, posed: Living, victim: Living, address: str, method: str) -> None:
        self.victim = victim
        self.posed = posed
        self.method = method
        self.address = address
        self._key = key

    def hello(self, **changes: object) -> StreamHello:
        whole = StreamHello(self.posed.task, self.posed.incarnation, self.victim.incarnation, bytes(NONCE_BYTES))
        return whole._replace(**changes)  # type: ignore[arg-type]

    def dialer(self, hello: StreamHello, key: Key | None = None, address: str | None = None) -> Dialer:
        parties = Parties(
            purpose=f"Task.{self.method}",
            dialer=hello.task,
            acceptor=self.victim.task,
            version=__version__,
            dialer_life=hello.incarnation,
            acceptor_life=hello.meant,
            acceptor_address=self.address if address is None else address,
        )
        return Dialer((key or self._key).sub(Purpose.DATA), parties)

    def open(self) -> closing[RawStream]:
        return closing(RawStream(self.address, self.method))

    def outcome(self, stream: RawStream) -> Refusal | str:
        """What the victim answers last."""
        try:
            while True:
                frames.unpack_hello(stream.answer())
        except ProofError as refused:
            return refused.refusal
        except FrameError as fault:
            return str(fault)


StreamAttack = Callable[[StreamVisitor, Path], Refusal | str]


def without_a_proof(visitor: StreamVisitor, folder: Path) -> Refusal | str:
    with visitor.open() as stream:
        stream.send(frames.pack_hello(visitor.hello(nonce=b"")))
        return visitor.outcome(stream)


def with_another_key(visitor: StreamVisitor, folder: Path) -> Refusal | str:
    dialer = visitor.dialer(visitor.hello(), find_key(make_key(folder / "other")))
    with visitor.open() as stream:
        stream.send(frames.pack_hello(visitor.hello(nonce=dialer.nonce)))
        opening = frames.unpack_proof(stream.answer())
        with pytest.raises(ProofError):
            dialer.answer(opening)
        stream.send(frames.pack(Header(FrameKind.PROOF), bytes(32)))
        return visitor.outcome(stream)


def with_the_proof_sent_back(visitor: StreamVisitor, folder: Path) -> Refusal | str:
    with visitor.open() as stream:
        stream.send(frames.pack_hello(visitor.hello()))
        opening = frames.unpack_proof(stream.answer())
        stream.send(frames.pack(Header(FrameKind.PROOF), opening[NONCE_BYTES:]))
        return visitor.outcome(stream)


def with_a_recorded_proof(visitor: StreamVisitor, folder: Path) -> Refusal | str:
    hello = visitor.hello()
    dialer = visitor.dialer(hello)
    said = [frames.pack_hello(hello._replace(nonce=dialer.nonce))]
    with visitor.open() as stream:
        stream.send(said[0])
        proof, _ = dialer.answer(frames.unpack_proof(stream.answer()))
    said.append(frames.pack(Header(FrameKind.PROOF), proof))
    with visitor.open() as stream:
        stream.send(said[0])
        stream.answer()
        stream.send(said[1])
        return visitor.outcome(stream)


def for_an_earlier_life(visitor: StreamVisitor, folder: Path) -> Refusal | str:
    with visitor.open() as stream:
        stream.send(frames.pack_hello(visitor.hello(meant=visitor.victim.incarnation - 1)))
        return visitor.outcome(stream)


def in_an_earlier_life(visitor: StreamVisitor, folder: Path) -> Refusal | str:
    hello = visitor.hello(incarnation=visitor.posed.incarnation - 1)
    dialer = visitor.dialer(hello)
    with visitor.open() as stream:
        stream.send(frames.pack_hello(hello._replace(nonce=dialer.nonce)))
        proof, _ = dialer.answer(frames.unpack_proof(stream.answer()))
        stream.send(frames.pack(Header(FrameKind.PROOF), proof))
        return visitor.outcome(stream)


STREAM_ATTACKS: dict[StreamAttack, Refusal | str] = {
    without_a_proof: Refusal.NO_KEY_HERE,
    with_another_key: Refusal.OTHER_KEY,
    with_the_proof_sent_back: Refusal.OTHER_KEY,
    with_a_recorded_proof: Refusal.OTHER_KEY,
    for_an_earlier_life: Refusal.OTHER_TARGET,
    in_an_earlier_life: "does not expect",
}
