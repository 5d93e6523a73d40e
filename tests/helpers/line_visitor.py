"""Somebody at the port for tensors of ``grpc+tcp``, where only the proof stands between a caller and a link."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.keys import make_key
from helpers.stream_visitor import Living
from lockstep.security import tls, wire
from lockstep.security.certificates import NAME, certificates_for
from lockstep.security.key import Key, Purpose, find_key
from lockstep.security.proof import (
    INSECURE,
    NONCE_BYTES,
    Dialer,
    Parties,
    ProofError,
    Refusal,
    pack_fields,
    refusal_by_peer,
)
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.tcp.endpoint import PRIVATE
from lockstep.transports.tcp.opening import LinePurpose, parties_of

SECONDS = 15.0
_LENGTH = struct.Struct("<I")


class LineVisitor:
    """Tries to take the place of one task at the connections of another, with everything but what an attack lacks."""

    def __init__(self, key: Key, posed: Living, victim: Living, address: str) -> None:
        self.posed = posed
        self.victim = victim
        self.address = address
        self._key = key

    def parties(self, *, life: int | None = None, meant: int | None = None, place: int = 0) -> Parties:
        purpose = LinePurpose(self.victim.incarnation if meant is None else meant, 7, place, place + 1)
        life = self.posed.incarnation if life is None else life
        return parties_of(purpose, self.posed.task, life, self.victim.task, self.address)

    def key(self, other: Key | None = None) -> bytes:
        return (other or self._key).sub(Purpose.DATA)

    def open(self) -> socket.socket:
        """A connection; where one wants TLS, with a certificate of the job."""
        where = parse_address(self.address.removeprefix(PRIVATE))
        line = socket.create_connection((where.host, where.port), SECONDS)
        if not self.address.startswith(PRIVATE):
            return line
        context = tls._context(ssl.PROTOCOL_TLS_CLIENT, certificates_for(self._key))
        return context.wrap_socket(line, server_hostname=NAME)


def claim(parties: Parties, nonce: bytes) -> bytes:
    """The first words of a dialer."""
    life = parties.dialer_life.to_bytes(8, "little")
    words = (parties.purpose.encode(), parties.dialer.encode(), life, parties.version.encode(), nonce)
    return pack_fields((b"lockstep proof 1", *words))


def say(line: socket.socket, message: bytes) -> None:
    line.sendall(_LENGTH.pack(len(message)) + message)


def hear(line: socket.socket) -> bytes:
    """One message; empty: it has hung up."""
    head = _whole(line, 4)
    return _whole(line, _LENGTH.unpack(head)[0]) if len(head) == 4 else b""


def _whole(line: socket.socket, nbytes: int) -> bytes:
    came = b""
    while len(came) < nbytes and (part := line.recv(nbytes - len(came))):
        came += part
    return came


def outcome(line: socket.socket) -> Refusal | str:
    """What the victim answers last."""
    answer = hear(line)
    if answer[:1] != b"R":
        return f"not refused: {answer!r}"
    return refusal_by_peer(answer[1:])


LineAttack = Callable[[LineVisitor, Path], Refusal | str]


def without_a_proof(visitor: LineVisitor, folder: Path) -> Refusal | str:
    with visitor.open() as line:
        say(line, claim(visitor.parties(), INSECURE))
        return outcome(line)


def with_another_key(visitor: LineVisitor, folder: Path) -> Refusal | str:
    parties = visitor.parties()
    dialer = Dialer(visitor.key(find_key(make_key(folder / visitor.address.removeprefix(PRIVATE)))), parties)
    with visitor.open() as line:
        say(line, claim(parties, dialer.nonce))
        opening = hear(line)[1:]
        with pytest.raises(ProofError):
            dialer.answer(opening)
        say(line, b"D" + bytes(32))
        return outcome(line)


def with_the_proof_sent_back(visitor: LineVisitor, folder: Path) -> Refusal | str:
    with visitor.open() as line:
        say(line, claim(visitor.parties(), bytes(NONCE_BYTES)))
        say(line, b"D" + hear(line)[1 + NONCE_BYTES :])
        return outcome(line)


def with_a_recorded_proof(visitor: LineVisitor, folder: Path) -> Refusal | str:
    """It is made on a connection that is said to be the second of a link: there is none, so it is hung up on."""
    parties = visitor.parties(place=1)
    dialer = Dialer(visitor.key(), parties)
    with visitor.open() as line:
        say(line, claim(parties, dialer.nonce))
        proof, _ = dialer.answer(hear(line)[1:])
        say(line, b"D" + proof)
        assert hear(line) == b""
    with visitor.open() as line:
        say(line, claim(parties, dialer.nonce))
        hear(line)
        say(line, b"D" + proof)
        return outcome(line)


def for_an_earlier_life(visitor: LineVisitor, folder: Path) -> Refusal | str:
    with visitor.open() as line:
        say(line, claim(visitor.parties(meant=visitor.victim.incarnation - 1), bytes(NONCE_BYTES)))
        return outcome(line)


def for_something_else(visitor: LineVisitor, folder: Path) -> Refusal | str:
    """A proof for what else the same sub-key opens."""
    parties = Parties(purpose="net", dialer="caller", acceptor="server", version=visitor.parties().version)
    with visitor.open() as line:
        say(line, claim(parties, bytes(NONCE_BYTES)))
        return outcome(line)


def in_an_earlier_life(visitor: LineVisitor, folder: Path) -> Refusal | str:
    parties = visitor.parties(life=visitor.posed.incarnation - 1)
    with visitor.open() as line:
        proven = wire.dial(line, visitor.key(), parties, time.monotonic() + SECONDS)
        return proven.receive(2048, time.monotonic() + SECONDS).decode()


LINE_ATTACKS: dict[LineAttack, Refusal | str] = {
    without_a_proof: Refusal.NO_KEY_HERE,
    with_another_key: Refusal.OTHER_KEY,
    with_the_proof_sent_back: Refusal.OTHER_KEY,
    with_a_recorded_proof: Refusal.OTHER_KEY,
    for_an_earlier_life: Refusal.OTHER_TARGET,
    for_something_else: Refusal.OTHER_TARGET,
    in_an_earlier_life: "does not expect",
}
