"""Frames of a data stream, and the kinds of frame that every transport on such a stream knows.

A frame is a ``DataFrame`` of the contract, written by hand so that the payload is copied into it exactly once and can
be read in place: field 1 holds the fixed header below, field 2 the payload.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from lockstep.foreign import plain
from lockstep.security.proof import INSECURE, ProofError, Refusal, refusal_by_peer
from lockstep.transports.frame_error import FrameError

MAX_TEXT_BYTES: Final = 2048

_HEADER: Final = struct.Struct("<BBHQQ8sQQ")
# Tag and length of field 1, the header, tag of field 2, its length as a varint of always five bytes.
_FRAME: Final = struct.Struct(f"<BB{_HEADER.size}sB5s")
_HEADER_TAG: Final = 0x0A
_PAYLOAD_TAG: Final = 0x12

PREFIX_BYTES: Final = _FRAME.size


class FrameKind(IntEnum):
    """What a frame is. The other numbers belong to the transports."""

    HELLO = 1  # payload: who I am and whom I mean
    RELEASE = 3  # the bytes of the loan ``transfer`` may be overwritten
    FAULT = 4  # payload: the rule that you broke; I end the link
    GOODBYE = 5  # I close the link
    PROOF = 6  # payload: I know the job's key (security/proof.py)


NO_PATH: Final = 1
"""Flag of a fault: no rule was broken, but the two ends cannot reach each other in the way that was requested."""

REFUSED: Final = 2
"""Flag of a fault: the proof failed; the payload is the ``Refusal``."""


class Header(NamedTuple):
    """The fixed part of every frame. ``key`` opens the region; ``total`` is the size of the whole transfer."""

    kind: int
    flags: int = 0
    note_bytes: int = 0
    transfer: int = 0
    region: int = 0
    key: bytes = bytes(8)
    offset: int = 0
    total: int = 0


def _five_bytes(length: int) -> bytes:
    """A length as a varint of fixed width, so that the payload always begins at the same offset."""
    return bytes(
        (length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21 & 127 | 128, length >> 28)
    )


def pack(header: Header, *payload: bytes | memoryview) -> bytes:
    """One frame; the only copy of the payload on the sending side."""
    length = sum([len(part) for part in payload])
    prefix = _FRAME.pack(_HEADER_TAG, _HEADER.size, _HEADER.pack(*header), _PAYLOAD_TAG, _five_bytes(length))
    return b"".join((prefix, *payload))


def unpack(frame: bytes) -> tuple[Header, memoryview]:
    """Header and payload of a frame, the payload in place."""
    if len(frame) < PREFIX_BYTES:
        raise FrameError(f"a frame has at least {PREFIX_BYTES} bytes, this one has {len(frame)}")
    header_tag, header_bytes, packed, payload_tag, length = _FRAME.unpack_from(frame)
    if header_tag != _HEADER_TAG or header_bytes != _HEADER.size or payload_tag != _PAYLOAD_TAG:
        raise FrameError("these bytes are not a data frame")
    payload = memoryview(frame)[PREFIX_BYTES:]
    if length != _five_bytes(len(payload)):
        raise FrameError("the length of a data frame does not match its header")
    return Header._make(_HEADER.unpack(packed)), payload


_HELLO: Final = struct.Struct("<QQB")


class StreamHello(NamedTuple):
    """Who I am, which incarnation of you I mean, and the nonce with which I ask for a proof."""

    task: str
    incarnation: int
    meant: int
    nonce: bytes = INSECURE


def pack_hello(hello: StreamHello) -> bytes:
    """The first frame of the dialer, and the acceptor's last one before the link is up."""
    numbers = _HELLO.pack(hello.incarnation, hello.meant, len(hello.nonce))
    return pack(Header(FrameKind.HELLO), numbers, hello.nonce, hello.task.encode())


def unpack_hello(frame: bytes) -> StreamHello:
    """``FrameError`` also for frames of another kind; ``ProofError`` if the peer refuses this end."""
    payload = _expect(FrameKind.HELLO, frame)
    if not _HELLO.size < len(payload) <= MAX_TEXT_BYTES:
        raise FrameError("a data stream must begin with a hello")
    incarnation, meant, nonce_bytes = _HELLO.unpack_from(payload)
    rest = payload[_HELLO.size :]
    return StreamHello(text_of(rest[nonce_bytes:]), incarnation, meant, bytes(rest[:nonce_bytes]))


def unpack_proof(frame: bytes) -> bytes:
    """What ``security/proof.py`` takes; errors as in ``unpack_hello``."""
    return bytes(_expect(FrameKind.PROOF, frame)[:MAX_TEXT_BYTES])


def _expect(kind: FrameKind, frame: bytes) -> memoryview:
    header, payload = unpack(frame)
    if header.kind == FrameKind.FAULT and header.flags & REFUSED:
        raise ProofError(refusal_by_peer(bytes(payload[:MAX_TEXT_BYTES])))
    if header.kind == FrameKind.FAULT:
        raise FrameError(text_of(payload))
    if header.kind != kind:
        raise FrameError(f"a frame of kind {header.kind} does not belong to the beginning of a data stream")
    return payload


def pack_refusal(refusal: Refusal) -> bytes:
    """The frame that tells the peer that it is no member of the job as far as this end can see."""
    return pack(Header(FrameKind.FAULT, REFUSED), refusal.value.encode())


def pack_fault(reason: str, flags: int = 0) -> bytes:
    """The frame that tells the peer which rule it broke, or that there is no path."""
    return pack(Header(FrameKind.FAULT, flags), reason.encode()[:MAX_TEXT_BYTES])


def text_of(payload: memoryview) -> str:
    """A text in a payload, whatever its bytes."""
    return plain(bytes(payload[:MAX_TEXT_BYTES]).decode(errors="replace"))
