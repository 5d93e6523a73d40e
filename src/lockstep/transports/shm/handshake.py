"""How two ends of a signal socket identify themselves, and prove that they can map one another's memory.

The dialer identifies itself and sends a challenge: a random number in memory, as a descriptor. The acceptor answers
with the number that it read there and with its own challenge, which the dialer answers in turn. A last message from
the acceptor confirms that answer. Only then is the link up, at both ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from lockstep.transports.base import PeerAddress, TransportError
from lockstep.transports.frame_error import FrameError
from lockstep.transports.shm.frames import pack_hello, unpack_hello
from lockstep.transports.shm.memory import make_memory_file, map_file
from lockstep.transports.shm.signal_socket import Signals
from lockstep.transports.shm.tokens import Tokens

_CHALLENGE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ThisEnd:
    """This end, and what it presents: the descriptor of its tokens, and a challenge."""

    task: str
    incarnation: int
    tokens: int
    challenge: int
    expected: str


def introduce(task: str, incarnation: int, tokens: int, kept: ExitStack) -> ThisEnd:
    """This end with a fresh challenge; ``kept`` closes the descriptors."""
    challenge = make_memory_file(_CHALLENGE_BYTES, "a challenge")
    kept.callback(os.close, challenge)
    kept.callback(os.close, tokens)
    value = secrets.token_bytes(_CHALLENGE_BYTES)
    with map_file(challenge, _CHALLENGE_BYTES, writable=True) as memory:
        memory[:] = value
    return ThisEnd(task, incarnation, tokens, challenge, value.hex())


@dataclass(frozen=True, slots=True)
class IncomingPeer:
    """A dialer that has identified itself; the acceptor closes its descriptors."""

    signals: Signals
    task: str
    incarnation: int
    meant: int
    secret: str
    descriptors: list[int]

    def close_descriptors(self) -> None:
        _close(self.descriptors)


def greet(signals: Signals, me: ThisEnd, peer: PeerAddress, secret: str, deadline: float) -> Tokens:
    """The dialer's part, once connected; returns the peer's tokens. ``FrameError`` says what went wrong."""
    signals.send(_hello(me, peer.incarnation, secret, ""), [me.challenge, me.tokens])
    answer, descriptors = _next(signals, deadline, peer.task)
    try:
        if (answer.get("task"), answer.get("life")) != (peer.task, peer.incarnation):
            raise FrameError(f"{answer.get('task')} answered instead of {peer.task}")
        _check(answer, me, peer.task)
        seen, tokens = _look_at(descriptors)
    finally:
        _close(descriptors)
    signals.send(pack_hello({"seen": seen}))
    _, more = _next(signals, deadline, peer.task)
    _close(more)
    return tokens


def listen_to(signals: Signals, deadline: float) -> IncomingPeer:
    """The acceptor's first part: find out who the visitor is."""
    content, descriptors = _next(signals, deadline, "the visitor")
    task, life, meant, secret = (content.get(name) for name in ("task", "life", "meant", "secret"))
    if not (isinstance(task, str) and isinstance(life, int) and isinstance(meant, int) and isinstance(secret, str)):
        _close(descriptors)
        raise FrameError("a hello does not name its sender")
    return IncomingPeer(signals, task, life, meant, secret, descriptors)


def welcome(visitor: IncomingPeer, me: ThisEnd, deadline: float) -> Tokens:
    """The acceptor's second part; returns the peer's tokens."""
    signals = visitor.signals
    seen, tokens = _look_at(visitor.descriptors)
    signals.send(_hello(me, visitor.incarnation, "", seen), [me.challenge, me.tokens])
    proof, more = _next(signals, deadline, visitor.task)
    _close(more)
    _check(proof, me, visitor.task)
    signals.send(pack_hello({}))
    return tokens


def check_user(connection: socket.socket, task: str) -> None:
    """Refuse a peer of another user; the kernel knows which user is at the other end."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", packed)
    if user not in (0, os.getuid()) and os.getuid() != 0:
        raise FrameError(f"{task} belongs to another user ({user}); run all tasks of a job as the same user")


def _hello(me: ThisEnd, meant: int, secret: str, seen: str) -> bytes:
    return pack_hello({"task": me.task, "life": me.incarnation, "meant": meant, "secret": secret, "seen": seen})


def _check(content: dict[str, Any], me: ThisEnd, task: str) -> None:
    if content.get("seen") != me.expected:
        raise FrameError(f"{task} does not see the same memory as this task; they do not share a host")


def _look_at(descriptors: Sequence[int]) -> tuple[str, Tokens]:
    if len(descriptors) != 2:
        raise FrameError("a hello came without its memory")
    try:
        with map_file(descriptors[0], _CHALLENGE_BYTES, writable=False) as memory:
            seen = memory[:_CHALLENGE_BYTES].hex()
        return seen, Tokens(descriptors[1])
    except TransportError as error:
        raise FrameError(str(error)) from error


def _next(signals: Signals, deadline: float, task: str) -> tuple[dict[str, Any], list[int]]:
    try:
        frame = signals.receive_within(max(0.0, deadline - time.monotonic()))
    except EOFError as error:
        raise FrameError(f"{task} hung up before it identified itself") from error
    if frame is None:
        raise FrameError(f"{task} did not answer in time")
    data, descriptors = frame
    try:
        return unpack_hello(data), descriptors
    except FrameError:
        _close(descriptors)
        raise


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
