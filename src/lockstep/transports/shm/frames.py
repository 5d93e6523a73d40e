"""What crosses the signal socket: small frames with fixed fields.

A frame never contains tensor bytes. Everything that a peer sends is checked before it is used.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from lockstep.foreign import plain
from lockstep.security.proof import ProofError, Refusal, pack_fields, refusal_by_peer, unpack_fields
from lockstep.transports.frame_error import FrameError
from lockstep.transports.memory import MAX_NOTE_BYTES

MAX_FRAME_BYTES: Final = MAX_NOTE_BYTES + 4096
MAX_WORD_BYTES: Final = MAX_FRAME_BYTES - 1
_MAX_TEXT_BYTES: Final = 2048


class SignalKind(IntEnum):
    """What a frame is."""

    HELLO = 1  # what I read in your challenge, with my own
    REGION = 2  # one of my regions, with its descriptor
    FORGET = 3  # that region is closed
    OFFER = 4  # bytes that you may copy or read
    DONE = 5  # the copy is made, or the loan released
    DROPPED = 6  # the offer was withdrawn before I got to it
    FAULT = 7  # the rule that you broke; I end the link
    GOODBYE = 8  # I close the link
    CLAIM = 9  # who I am, whom I mean, and a nonce
    PROOF = 10  # I know what only a member of the job knows (security/proof.py)
    REFUSED = 11  # you do not; a ``Refusal``
    WORD = 12  # from our owner to yours


LOAN: Final = 1

_OFFER: Final = struct.Struct("<BBHIQQQQQ8sQ")
_REGION: Final = struct.Struct("<BQQ")
_NUMBER: Final = struct.Struct("<BQ")


class Offer(NamedTuple):
    """One transfer: where its bytes are at the sender, and where they go."""

    flags: int
    token: int
    transfer: int
    region: int
    offset: int
    nbytes: int
    target: int
    key: bytes
    target_offset: int
    note: bytes


def pack_offer(offer: Offer) -> bytes:
    *fields, note = offer
    flags, token, *places = fields
    return _OFFER.pack(SignalKind.OFFER, flags, len(note), token, *places) + note


def unpack_offer(frame: bytes) -> Offer:
    if len(frame) < _OFFER.size:
        raise FrameError("an offer is too short")
    _, flags, note_bytes, token, *places = _OFFER.unpack_from(frame)
    note = frame[_OFFER.size :]
    if len(note) != note_bytes:
        raise FrameError("the length of an offer does not match its header")
    transfer, region, offset, nbytes, target, key, target_offset = places
    return Offer(flags, token, transfer, region, offset, nbytes, target, key, target_offset, note)


def pack_region(number: int, nbytes: int) -> bytes:
    return _REGION.pack(SignalKind.REGION, number, nbytes)


def unpack_region(frame: bytes) -> tuple[int, int]:
    if len(frame) != _REGION.size:
        raise FrameError("the announcement of a region has the wrong length")
    _, number, nbytes = _REGION.unpack(frame)
    return number, nbytes


def pack_number(kind: SignalKind, number: int) -> bytes:
    """A frame that only names a transfer or a region."""
    return _NUMBER.pack(kind, number)


def unpack_number(frame: bytes) -> int:
    if len(frame) != _NUMBER.size:
        raise FrameError("a frame has the wrong length")
    return int(_NUMBER.unpack(frame)[1])


class DoorClaim(NamedTuple):
    """What a visitor says about itself before it has proven anything."""

    task: str
    incarnation: int
    meant: int
    keyed: bool
    nonce: bytes


_LIVES: Final = struct.Struct("<QQB")


def pack_claim(claim: DoorClaim) -> bytes:
    lives = _LIVES.pack(claim.incarnation, claim.meant, claim.keyed)
    return pack_opening(SignalKind.CLAIM, pack_fields((claim.task.encode(), lives, claim.nonce)))


def unpack_claim(frame: bytes) -> DoorClaim:
    """``ProofError`` for anything else."""
    try:
        task, lives, nonce = unpack_fields(unpack_opening(SignalKind.CLAIM, frame), 3)
        incarnation, meant, keyed = _LIVES.unpack(lives)
        return DoorClaim(task.decode(), incarnation, meant, bool(keyed), nonce)
    except (FrameError, struct.error, UnicodeDecodeError) as error:
        raise ProofError(Refusal.MALFORMED) from error


def pack_opening(kind: SignalKind, content: bytes) -> bytes:
    """A frame of the handshake."""
    return bytes([kind]) + content


def unpack_opening(kind: SignalKind, frame: bytes) -> bytes:
    """The content of a frame of this kind; ``FrameError`` and ``ProofError`` are also what the peer says instead."""
    if frame[:1] == bytes([SignalKind.FAULT]):
        raise FrameError(text_of(frame))
    if frame[:1] == bytes([SignalKind.REFUSED]):
        raise ProofError(refusal_by_peer(frame[1:]))
    if frame[:1] != bytes([kind]):
        raise FrameError("this frame does not belong to the beginning of a signal socket")
    return frame[1:]


def pack_word(word: bytes) -> bytes:
    return bytes([SignalKind.WORD]) + word


def pack_fault(reason: str) -> bytes:
    return bytes([SignalKind.FAULT]) + reason.encode()[:_MAX_TEXT_BYTES]


def text_of(frame: bytes) -> str:
    return plain(frame[1 : 1 + _MAX_TEXT_BYTES].decode(errors="replace"))
