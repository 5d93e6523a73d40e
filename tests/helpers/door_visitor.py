"""Somebody at the door of shared memory, in the name of a member."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.keys import make_key
from helpers.stream_visitor import Living
from helpers.wire import PATIENCE
from lockstep.security.key import Key, find_key
from lockstep.security.proof import NONCE_BYTES, Dialer, ProofError, Refusal
from lockstep.transports.shm.frames import (
    DoorClaim,
    SignalKind,
    pack_claim,
    pack_opening,
    unpack_opening,
)
from lockstep.transports.shm.handshake import DoorKey, door_key
from lockstep.transports.shm.host import HostPlace, door_address


class DoorVisitor:
    """Somebody at the door ``place`` of one task, in the name of another; ``key`` is that of their job."""

    def __init__(self, key: Key | None, posed: Living, victim: Living, place: HostPlace, folder: Path) -> None:
        self.posed, self.victim = posed, victim
        self.place = place
        self.right = door_key(place, key)
        self.other = door_key(place, find_key(make_key(folder / "other")))

    @contextmanager
    def knock(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
            knocking.settimeout(PATIENCE)
            knocking.connect(door_address(self.place))
            yield knocking

    def claim(self, **changes: object) -> DoorClaim:
        whole = DoorClaim(self.posed.task, self.posed.incarnation, self.victim.incarnation, True, bytes(NONCE_BYTES))
        return whole._replace(**changes)  # type: ignore[arg-type]

    def dialer(self, claim: DoorClaim, key: DoorKey) -> Dialer:
        return Dialer(key.secret, key.parties(claim, self.victim.task))


def refusal_at(knocking: socket.socket) -> Refusal | str:
    try:
        while frame := knocking.recv(4096):
            unpack_opening(SignalKind.PROOF, frame)
    except ProofError as refused:
        return refused.refusal
    return "closed"


def without_a_key(visitor: DoorVisitor) -> Refusal | str:
    with visitor.knock() as knocking:
        knocking.send(pack_claim(visitor.claim(keyed=False)))
        return refusal_at(knocking)


def with_another_key(visitor: DoorVisitor) -> Refusal | str:
    dialer = visitor.dialer(visitor.claim(), visitor.other)
    with visitor.knock() as knocking:
        knocking.send(pack_claim(visitor.claim(nonce=dialer.nonce)))
        opening = unpack_opening(SignalKind.PROOF, knocking.recv(4096))
        with pytest.raises(ProofError):
            dialer.answer(opening)
        knocking.send(pack_opening(SignalKind.PROOF, bytes(32)))
        return refusal_at(knocking)


def with_the_key_and_without_the_secret(visitor: DoorVisitor) -> Refusal | str:
    wrong = DoorKey(visitor.right.door, True, bytes(32))
    dialer = visitor.dialer(visitor.claim(), wrong)
    with visitor.knock() as knocking:
        knocking.send(pack_claim(visitor.claim(nonce=dialer.nonce)))
        knocking.send(pack_opening(SignalKind.PROOF, bytes(32)))
        return refusal_at(knocking)


def with_the_proof_sent_back(visitor: DoorVisitor) -> Refusal | str:
    with visitor.knock() as knocking:
        knocking.send(pack_claim(visitor.claim()))
        knocking.send(pack_opening(SignalKind.PROOF, knocking.recv(4096)[1 + NONCE_BYTES :]))
        return refusal_at(knocking)


def with_a_recorded_proof(visitor: DoorVisitor) -> Refusal | str:
    dialer = visitor.dialer(visitor.claim(), visitor.right)
    claim = pack_claim(visitor.claim(nonce=dialer.nonce))
    with visitor.knock() as knocking:
        knocking.send(claim)
        proof, _ = dialer.answer(unpack_opening(SignalKind.PROOF, knocking.recv(4096)))
    with visitor.knock() as knocking:
        knocking.send(claim)
        knocking.recv(4096)
        knocking.send(pack_opening(SignalKind.PROOF, proof))
        return refusal_at(knocking)


def for_an_earlier_life(visitor: DoorVisitor) -> Refusal | str:
    with visitor.knock() as knocking:
        knocking.send(pack_claim(visitor.claim(meant=visitor.victim.incarnation - 1)))
        return refusal_at(knocking)


def in_the_form_of_before(visitor: DoorVisitor) -> Refusal | str:
    """A hello in JSON with the secret in clear, and descriptors."""
    hello = {"task": visitor.posed.task, "life": visitor.posed.incarnation, "meant": visitor.victim.incarnation}
    content = json.dumps(hello | {"secret": visitor.place.secret, "seen": ""}).encode()
    with visitor.knock() as knocking:
        socket.send_fds(knocking, [bytes([SignalKind.HELLO]) + content], [0, 1])
        return refusal_at(knocking)


DoorAttack = Callable[[DoorVisitor], Refusal | str]
DOOR_ATTACKS: dict[DoorAttack, Refusal | str] = {
    without_a_key: Refusal.NO_KEY_HERE,
    with_another_key: Refusal.OTHER_KEY,
    with_the_key_and_without_the_secret: Refusal.OTHER_KEY,
    with_the_proof_sent_back: Refusal.OTHER_KEY,
    with_a_recorded_proof: Refusal.OTHER_KEY,
    for_an_earlier_life: Refusal.OTHER_TARGET,
    in_the_form_of_before: Refusal.MALFORMED,
}
