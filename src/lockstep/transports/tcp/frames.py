"""What crosses a connection of ``grpc+tcp``: a fixed head, then the note, then bytes of a tensor.

A tensor goes in chunks, so that a link can say something else between two of them: that a loan is released, that it
ends, or that the rest of this tensor will not come. Everything that a peer sends is checked before it is used.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from lockstep.foreign import plain
from lockstep.transports.frame_error import FrameError
from lockstep.transports.memory import MAX_NOTE_BYTES

HEAD: Final = struct.Struct("<BBHIQQ8sQQ")
HEAD_BYTES: Final = HEAD.size
CHUNK_BYTES: Final = 4 << 20
MAX_LINES: Final = 8
"""Connections of one link."""
STRIPED_BYTES: Final = 1 << 20
"""A smaller chunk goes over one connection."""

_MAX_TEXT_BYTES: Final = 2048

STRIPED: Final = 8
"""Flag of a chunk, besides those of ``landing.py``: its bytes are spread over all connections (``shares``)."""


class LineFrame(IntEnum):
    """What a frame is."""

    CHUNK = 1
    RELEASE = 2  # the bytes of the loan ``transfer`` may be overwritten
    FAULT = 3  # note: the rule that you broke; I end the link
    GOODBYE = 4  # I close the link


CHUNK: Final = int(LineFrame.CHUNK)
_LAST_KIND: Final = int(max(LineFrame))


class ChunkHead(NamedTuple):
    """The fixed part of every frame. ``nbytes`` follow after the note; ``total`` is the size of the whole transfer."""

    kind: int
    flags: int = 0
    note_bytes: int = 0
    nbytes: int = 0
    transfer: int = 0
    region: int = 0
    key: bytes = bytes(8)
    offset: int = 0
    total: int = 0


def unpack_head(data: bytes | bytearray | memoryview) -> ChunkHead:
    """``FrameError`` if no frame begins like this."""
    if len(data) != HEAD_BYTES:
        raise FrameError(f"the head of a frame has {HEAD_BYTES} bytes, this one has {len(data)}")
    head = tuple.__new__(ChunkHead, HEAD.unpack(data))
    kind, note_bytes, nbytes = head[0], head[2], head[3]
    if not CHUNK <= kind <= _LAST_KIND:
        raise FrameError(f"a frame of kind {kind} does not belong here")
    if note_bytes > MAX_NOTE_BYTES or nbytes > CHUNK_BYTES:
        raise FrameError("a frame is larger than any that is sent here")
    if nbytes and kind != CHUNK:
        raise FrameError(f"a frame of kind {kind} has no bytes of a tensor")
    return head


def pack_release(transfer: int) -> bytes:
    return HEAD.pack(*ChunkHead(LineFrame.RELEASE, transfer=transfer))


def pack_goodbye() -> bytes:
    return HEAD.pack(*ChunkHead(LineFrame.GOODBYE))


def pack_fault(reason: str) -> bytes:
    text = reason.encode()[:_MAX_TEXT_BYTES]
    return HEAD.pack(*ChunkHead(LineFrame.FAULT, note_bytes=len(text))) + text


def text_of(note: bytes) -> str:
    """A text of the peer, whatever its bytes."""
    return plain(note[:_MAX_TEXT_BYTES].decode(errors="replace"))


def shares(nbytes: int, lines: int) -> list[tuple[int, int]]:
    """How a striped chunk is spread: begin and end of the bytes of each connection, which both ends compute."""
    share = -(-nbytes // lines)
    return [(min(at * share, nbytes), min((at + 1) * share, nbytes)) for at in range(lines)]
