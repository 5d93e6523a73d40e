"""How two ends of a signal socket prove who they are, and that they can map one another's memory.

First the proof of ``security/proof.py``, with a key made of the job's key and the secret of the door: only those to
whom the acceptor has published its address over the control link have both, and neither crosses the socket. The kernel
says that the other end is the same user; that alone would let in every program of that user, and of every job.

Then the memory. The dialer sends a challenge: a random number in memory, as a descriptor. The acceptor answers with the
number that it read there and with its own challenge, which the dialer answers in turn. A last message from the acceptor
confirms that answer. Only then is the link up, at both ends. No descriptor is taken before the proof.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from lockstep.protocol.core.timing import HELLO_SECONDS
from lockstep.security.key import Key, Purpose
from lockstep.security.proof import Acceptor, Dialer, Parties, ProofError, Refusal
from lockstep.security.wire import FIRST_SECONDS
from lockstep.transports.base import PeerAddress, TransportError
from lockstep.transports.frame_error import FrameError
from lockstep.transports.shm.frames import (
    DoorClaim,
    SignalKind,
    pack_claim,
    pack_opening,
    unpack_claim,
    unpack_opening,
)
from lockstep.transports.shm.host import HostPlace
from lockstep.transports.shm.memory import make_memory_file, map_file
from lockstep.transports.shm.signal_socket import Signals
from lockstep.transports.shm.tokens import Tokens
from lockstep.version import __version__

_CHALLENGE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ThisEnd:
    """This end, and what it presents: the descriptor of its tokens, and a challenge."""

    task: str
    incarnation: int
    tokens: int
    challenge: int
    expected: bytes


def introduce(task: str, incarnation: int, tokens: int, kept: ExitStack) -> ThisEnd:
    """This end with a fresh challenge; ``kept`` closes the descriptors."""
    challenge = make_memory_file(_CHALLENGE_BYTES, "a challenge")
    kept.callback(os.close, challenge)
    kept.callback(os.close, tokens)
    value = secrets.token_bytes(_CHALLENGE_BYTES)
    with map_file(challenge, _CHALLENGE_BYTES, writable=True) as memory:
        memory[:] = value
    return ThisEnd(task, incarnation, tokens, challenge, value)


@dataclass(frozen=True, slots=True)
class DoorKey:
    """What opens one door."""

    door: str
    keyed: bool
    """Whether the job has a key at all; without one (``--insecure``) the secret of the door has to do."""
    secret: bytes

    def parties(self, claim: DoorClaim, acceptor: str) -> Parties:
        return Parties(
            purpose="door",
            dialer=claim.task,
            acceptor=acceptor,
            version=__version__,
            dialer_life=claim.incarnation,
            acceptor_life=claim.meant,
            acceptor_address=self.door,
        )


def door_key(place: HostPlace, key: Key | None) -> DoorKey:
    sub = b"" if key is None else key.sub(Purpose.DOOR)
    return DoorKey(place.door, key is not None, hmac.digest(sub, place.secret.encode(), hashlib.sha256))


@dataclass(frozen=True, slots=True)
class IncomingPeer:
    """A dialer that has proven itself."""

    signals: Signals
    task: str
    incarnation: int
    meant: int


def greet(signals: Signals, me: ThisEnd, peer: PeerAddress, key: DoorKey, deadline: float) -> Tokens:
    """The dialer's part, once connected; returns the peer's tokens. FrameError and ProofError say what went wrong."""
    claim = DoorClaim(me.task, me.incarnation, peer.incarnation, key.keyed, b"")
    dialer = Dialer(key.secret, key.parties(claim, peer.task))
    signals.send(pack_claim(claim._replace(nonce=dialer.nonce)))
    opening, _ = _next(signals, SignalKind.PROOF, deadline, peer.task, descriptors=0)
    proof, _ = dialer.answer(opening)
    signals.send(pack_opening(SignalKind.PROOF, proof))
    signals.send(pack_opening(SignalKind.HELLO, b""), [me.challenge, me.tokens])
    answer, descriptors = _next(signals, SignalKind.HELLO, deadline, peer.task)
    try:
        _check(answer, me, peer.task)
        seen, tokens = _look_at(descriptors)
    finally:
        _close(descriptors)
    signals.send(pack_opening(SignalKind.HELLO, seen))
    _next(signals, SignalKind.HELLO, deadline, peer.task, descriptors=0)
    return tokens


def listen_to(signals: Signals, task: str, incarnation: int, key: DoorKey, spoke: Callable[[], None]) -> IncomingPeer:
    """The acceptor's first part: let the visitor prove who it is."""
    began = time.monotonic()
    frame = _receive(signals, began + FIRST_SECONDS, "the visitor", descriptors=0)[0]
    claim = unpack_claim(frame)
    spoke()
    if claim.keyed != key.keyed:
        raise ProofError(Refusal.NO_KEY_THERE if key.keyed else Refusal.NO_KEY_HERE)
    if claim.meant != incarnation:
        raise ProofError(Refusal.OTHER_TARGET)
    acceptor = Acceptor(key.secret, key.parties(claim, task), claim.nonce)
    signals.send(pack_opening(SignalKind.PROOF, acceptor.opening))
    proof, _ = _next(signals, SignalKind.PROOF, began + HELLO_SECONDS, "the visitor", descriptors=0)
    acceptor.check(proof)
    return IncomingPeer(signals, claim.task, claim.incarnation, claim.meant)


def welcome(visitor: IncomingPeer, me: ThisEnd, deadline: float) -> Tokens:
    """The acceptor's second part; returns the peer's tokens."""
    signals = visitor.signals
    _, descriptors = _next(signals, SignalKind.HELLO, deadline, visitor.task)
    try:
        seen, tokens = _look_at(descriptors)
    finally:
        _close(descriptors)
    signals.send(pack_opening(SignalKind.HELLO, seen), [me.challenge, me.tokens])
    answer, _ = _next(signals, SignalKind.HELLO, deadline, visitor.task, descriptors=0)
    _check(answer, me, visitor.task)
    signals.send(pack_opening(SignalKind.HELLO, b""))
    return tokens


def check_user(connection: socket.socket, task: str) -> None:
    """Refuse a peer of another user, root included."""
    _, user = peer_of(connection)
    if user != os.geteuid():
        text = f"{task} belongs to another user ({user}); run all tasks of a job as the same user"
        raise FrameError(text, Refusal.OTHER_USER)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Which process of which user is at the other end, as the kernel knows it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", packed)
    return process, user


def _check(seen: bytes, me: ThisEnd, task: str) -> None:
    if seen != me.expected:
        raise FrameError(f"{task} does not see the same memory as this task; they do not share a host")


def _look_at(descriptors: Sequence[int]) -> tuple[bytes, Tokens]:
    if len(descriptors) != 2:
        raise FrameError("a hello came without its memory")
    try:
        with map_file(descriptors[0], _CHALLENGE_BYTES, writable=False) as memory:
            seen = memory[:_CHALLENGE_BYTES]
        return seen, Tokens(descriptors[1])
    except TransportError as error:
        raise FrameError(str(error)) from error


def _next(
    signals: Signals, kind: SignalKind, deadline: float, task: str, *, descriptors: int = 2
) -> tuple[bytes, list[int]]:
    """The content of the next frame, which must be of this kind, and the descriptors that came with it."""
    frame, came = _receive(signals, deadline, task, descriptors=descriptors)
    try:
        return unpack_opening(kind, frame), came
    except BaseException:
        _close(came)
        raise


def _receive(signals: Signals, deadline: float, task: str, *, descriptors: int) -> tuple[bytes, list[int]]:
    try:
        frame = signals.receive_within(max(0.0, deadline - time.monotonic()), descriptors)
    except EOFError as error:
        raise FrameError(f"{task} hung up before it identified itself", Refusal.CLOSED) from error
    if frame is None:
        raise FrameError(f"{task} did not answer in time", Refusal.LATE)
    return frame


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
