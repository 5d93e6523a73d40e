"""How the two ends of a connection prove to each other that they know the job's key, without sending it.

    dialer -> acceptor    who it is, whom it means, a nonce
    acceptor -> dialer    a nonce of its own, and its proof
    dialer -> acceptor    its proof

The acceptor proves itself first: its port may be held by somebody else, and what a dialer sends after this point is
not for strangers. A proof is an HMAC over everything both ends believe about the connection, so a change to any of it
on the way, or an end that means another incarnation, fails. The nonces make a recorded proof worthless, and the two
directions use different labels, so a proof that is sent back to its maker is none.

Nothing here reads or writes: who moves these bytes is up to each listener (``wire.py`` does it for sockets).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
OPENING_BYTES: Final = NONCE_BYTES + PROOF_BYTES
_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
_LABEL: Final = b"lockstep proof 1"


class Refusal(StrEnum):
    """Why a connection was refused before it was used."""

    NO_KEY_THERE = "no key there"
    NO_KEY_HERE = "no key here"
    OTHER_KEY = "other key"
    OTHER_VERSION = "other version"
    OTHER_TARGET = "other target"
    ALTERED = "altered"
    MALFORMED = "malformed"
    OTHER_USER = "other user"
    UNPROVEN = "unproven"
    NO_TOKEN = "no token"
    LATE = "late"
    CROWDED = "crowded"
    CLOSED = "closed"


_SENTENCES: Final = {
    Refusal.NO_KEY_THERE: "the other end runs without a key (--insecure), this end with one; use the same everywhere",
    Refusal.NO_KEY_HERE: "the other end wants a key, this end runs without one (--insecure); use the same everywhere",
    Refusal.OTHER_KEY: "the other end does not know this job's key; give every task of the job the same key",
    Refusal.OTHER_VERSION: "the other end runs another version of Lockstep; install the same version everywhere",
    Refusal.OTHER_TARGET: "this is not the task, or not the incarnation of it, that the other end means",
    Refusal.ALTERED: "a message was changed on its way",
    Refusal.MALFORMED: "the other end sent something that is not part of this handshake",
    Refusal.OTHER_USER: "the other end belongs to another user; run all tasks of a job as the same user",
    Refusal.UNPROVEN: "the other end began TLS, but did not complete it with this job's key, or left before its first "
    "call; give every task of the job the same key",
    Refusal.NO_TOKEN: "it did not send the token that 'lockstep metrics token' prints",
    Refusal.LATE: "the other end did not prove in time that it knows this job's key",
    Refusal.CROWDED: "it made room for another connection before it had proven that it knows this job's key",
    Refusal.CLOSED: "the other end hung up before it had proven that it knows this job's key",
}


def sentence_of(refusal: Refusal) -> str:
    """The same in words, seen from the end that refuses."""
    return _SENTENCES[refusal]


class ProofError(Exception):
    """The other end has not proven what it must; ``refusal`` says why, the text says it in words."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(sentence_of(refusal))
        self.refusal = refusal


_SWAPPED: Final = {Refusal.NO_KEY_HERE: Refusal.NO_KEY_THERE, Refusal.NO_KEY_THERE: Refusal.NO_KEY_HERE}


def refusal_by_peer(value: bytes) -> Refusal:
    """The value that the other end sent, seen from here (its "here" is there); anything unknown is malformed."""
    try:
        refusal = Refusal(value.decode())
    except ValueError:
        return Refusal.MALFORMED
    return _SWAPPED.get(refusal, refusal)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parties:
    """What both ends must agree on; each fills it in from what it knows itself."""

    purpose: str
    dialer: str
    acceptor: str
    version: str
    dialer_life: int = 0
    acceptor_life: int = 0
    job: str = ""
    dialer_address: str = ""
    acceptor_address: str = ""

    def pack(self) -> bytes:
        """Unambiguous: every field has its length in front."""
        return pack_fields(_bytes_of(getattr(self, each.name)) for each in fields(self))


def _bytes_of(value: str | int) -> bytes:
    return value.encode() if isinstance(value, str) else _NUMBER.pack(value)


def pack_fields(parts: Iterable[bytes]) -> bytes:
    """Fields one after the other, each with its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpack_fields(data: bytes, count: int) -> list[bytes]:
    """Exactly ``count`` fields and nothing after them, or ``ProofError``."""
    found: list[bytes] = []
    at = 0
    while at < len(data) and len(found) < count:
        if at + _LENGTH.size > len(data):
            break
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        found.append(data[at : at + length])
        at += length
    if at != len(data) or len(found) != count:
        raise ProofError(Refusal.MALFORMED)
    return found


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, pack_fields((_LABEL, label, *parts)), hashlib.sha256)


class Dialer:
    """The dialing end of one connection."""

    def __init__(self, key: bytes, parties: Parties) -> None:
        self.nonce = new_nonce()
        self._key = key
        self._parties = parties.pack()

    def answer(self, opening: bytes) -> tuple[bytes, Session]:
        """Check the acceptor's opening; returns this end's proof, and the session that both ends have now."""
        if len(opening) != OPENING_BYTES:
            raise ProofError(Refusal.MALFORMED)
        facts = (self._parties, self.nonce, opening[:NONCE_BYTES])
        if not hmac.compare_digest(_mac(self._key, b"acceptor", *facts), opening[NONCE_BYTES:]):
            raise ProofError(Refusal.OTHER_KEY)
        session = _mac(self._key, b"session", *facts)
        return _mac(self._key, b"dialer", *facts), Session(session, b"dialer", b"acceptor")


class Acceptor:
    """The accepting end of one connection."""

    def __init__(self, key: bytes, parties: Parties, dialer_nonce: bytes) -> None:
        if len(dialer_nonce) != NONCE_BYTES:
            raise ProofError(Refusal.MALFORMED)
        nonce = new_nonce()
        self._key = key
        self._facts = (parties.pack(), dialer_nonce, nonce)
        self.opening = nonce + _mac(key, b"acceptor", *self._facts)
        """What the dialer gets: this end's nonce and proof."""

    def check(self, proof: bytes) -> Session:
        """Check the dialer's proof; the session that both ends have now."""
        if not hmac.compare_digest(_mac(self._key, b"dialer", *self._facts), proof):
            raise ProofError(Refusal.OTHER_KEY)
        return Session(_mac(self._key, b"session", *self._facts), b"acceptor", b"dialer")


@dataclass(slots=True)
class Session:
    """Messages after the proof: numbered, and each with a MAC, so that nobody in between changes or repeats one.

    They are not encrypted. Without a key (``--insecure``) they are only passed through.
    """

    key: bytes | None = field(repr=False)
    own: bytes = b""
    other: bytes = b""
    _sent: int = 0
    _received: int = 0

    def seal(self, message: bytes) -> bytes:
        if self.key is None:
            return message
        self._sent += 1
        return _mac(self.key, self.own, _NUMBER.pack(self._sent), message) + message

    def open(self, sealed: bytes) -> bytes:
        if self.key is None:
            return sealed
        self._received += 1
        proof, message = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
        if not hmac.compare_digest(_mac(self.key, self.other, _NUMBER.pack(self._received), message), proof):
            raise ProofError(Refusal.ALTERED)
        return message


INSECURE: Final = b""
"""In the place of a nonce: this end has no key, and does not ask for a proof."""


def check_agreement(key: bytes | None, nonce: bytes) -> None:
    """Refuse one end with a key and one without; the acceptor calls it with what the dialer sent as its nonce."""
    if key is None and nonce != INSECURE:
        raise ProofError(Refusal.NO_KEY_HERE)
    if key is not None and nonce == INSECURE:
        raise ProofError(Refusal.NO_KEY_THERE)
