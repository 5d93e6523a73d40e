"""The proof over a blocking socket, and messages after it; each message has its length in front."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lockstep.security.proof import (
    INSECURE,
    PROOF_BYTES,
    Acceptor,
    Dialer,
    Parties,
    ProofError,
    Refusal,
    Session,
    check_agreement,
    pack_fields,
    refusal_by_peer,
    unpack_fields,
)

if TYPE_CHECKING:
    # Most jobs send tensors in the clear, and need not load OpenSSL for it.
    from lockstep.security.tls import PrivateConnection

    Connection = socket.socket | PrivateConnection

FIRST_BYTES: Final = 16 << 10
"""No message before the proof may be larger."""
FIRST_SECONDS: Final = 2.0
"""A dialer sends its first message as soon as it is connected."""
PROOF_SECONDS: Final = 10.0
"""The whole handshake; longer, since it takes an answer of a process that may be starting on a busy machine."""

_LENGTH: Final = struct.Struct("<I")
_MAGIC: Final = b"lockstep proof 1"
_OPENING, _PLAIN, _REFUSED, _PROOF = b"O", b"P", b"R", b"D"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a dialer says about itself, unproven."""

    purpose: str
    dialer: str
    dialer_life: int
    version: str


class ProvenSocket:
    """A connection whose two ends have proven themselves. ``ProofError`` ends it."""

    def __init__(self, connection: Connection, session: Session, claim: Claim | None = None) -> None:
        self.private = None if isinstance(connection, socket.socket) else connection
        """What encrypts, if anything does."""
        self.socket = connection if isinstance(connection, socket.socket) else connection.socket
        self._connection = connection
        self.claim = claim
        """What the dialer has said about itself, which is proven now; None at its own end."""
        self._session = session

    def send(self, message: bytes, deadline: float) -> None:
        _send(self._connection, self._session.seal(message), deadline)

    def receive(self, limit: int, deadline: float) -> bytes:
        return self._session.open(_receive(self._connection, limit + PROOF_BYTES, deadline))

    def close(self) -> None:
        self.socket.close()


def dial(connection: Connection, key: bytes | None, parties: Parties, deadline: float) -> ProvenSocket:
    """The dialer's part. ``ProofError`` says why the other end is refused, or refuses; the caller closes the socket."""
    dialer = None if key is None else Dialer(key, parties)
    life = parties.dialer_life.to_bytes(8, "little")
    nonce = INSECURE if dialer is None else dialer.nonce
    words = (parties.purpose.encode(), parties.dialer.encode(), life, parties.version.encode(), nonce)
    _send(connection, pack_fields((_MAGIC, *words)), deadline)
    answer = _receive(connection, FIRST_BYTES, deadline)
    kind, content = answer[:1], answer[1:]
    if kind == _REFUSED:
        raise ProofError(refusal_by_peer(content))
    if dialer is None:
        if kind != _PLAIN:
            raise ProofError(Refusal.NO_KEY_HERE if kind == _OPENING else Refusal.MALFORMED)
        return ProvenSocket(connection, Session(None))
    if kind != _OPENING:
        raise ProofError(Refusal.NO_KEY_THERE if kind == _PLAIN else Refusal.MALFORMED)
    proof, session = dialer.answer(content)
    _send(connection, _PROOF + proof, deadline)
    return ProvenSocket(connection, session)


def accept(
    connection: Connection,
    key: bytes | None,
    parties: Callable[[Claim], Parties],
    seconds: float = PROOF_SECONDS,
    spoke: Callable[[], object] = lambda: None,
) -> tuple[Claim, ProvenSocket]:
    """The acceptor's part. ``parties``: what this end believes about whoever claims this; it may raise ``ProofError``.
    ``spoke`` is called when the first message is there. The dialer is told why it is refused; the caller closes the
    socket."""
    began = time.monotonic()
    try:
        first = _receive(connection, FIRST_BYTES, began + min(FIRST_SECONDS, seconds))
        claim, nonce = _read_claim(first)
        spoke()
        believed = parties(claim)
        if claim.purpose != believed.purpose:
            raise ProofError(Refusal.OTHER_TARGET)
        if claim.version != believed.version:
            raise ProofError(Refusal.OTHER_VERSION)
        check_agreement(key, nonce)
        session = _check_dialer(connection, key, believed, nonce, began + seconds)
        return claim, ProvenSocket(connection, session, claim)
    except ProofError as error:
        with contextlib.suppress(ProofError):
            _send(connection, _REFUSED + error.refusal.value.encode(), time.monotonic() + 0.1)
        raise


def _check_dialer(
    connection: Connection, key: bytes | None, parties: Parties, nonce: bytes, deadline: float
) -> Session:
    if key is None:
        _send(connection, _PLAIN, deadline)
        return Session(None)
    acceptor = Acceptor(key, parties, nonce)
    _send(connection, _OPENING + acceptor.opening, deadline)
    answer = _receive(connection, FIRST_BYTES, deadline)
    if answer[:1] != _PROOF:
        raise ProofError(Refusal.MALFORMED)
    return acceptor.check(answer[1:])


def _read_claim(first: bytes) -> tuple[Claim, bytes]:
    magic, purpose, dialer, life, version, nonce = unpack_fields(first, 6)
    if magic != _MAGIC or len(life) != 8:
        raise ProofError(Refusal.MALFORMED)
    try:
        claim = Claim(purpose.decode(), dialer.decode(), int.from_bytes(life, "little"), version.decode())
    except UnicodeDecodeError as error:
        raise ProofError(Refusal.MALFORMED) from error
    return claim, nonce


def _send(connection: Connection, message: bytes, deadline: float) -> None:
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(_LENGTH.pack(len(message)) + message)
    except TimeoutError as error:
        raise ProofError(Refusal.LATE) from error
    except OSError as error:
        raise ProofError(Refusal.CLOSED) from error


def _receive(connection: Connection, limit: int, deadline: float) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > limit:
        raise ProofError(Refusal.MALFORMED)
    return _exactly(connection, length, deadline)


def _exactly(connection: Connection, nbytes: int, deadline: float) -> bytes:
    """The deadline is for all of it: one byte now and then does not extend it."""
    data = bytearray()
    while len(data) < nbytes:
        try:
            connection.settimeout(_left(deadline))
            part = connection.recv(min(65536, nbytes - len(data)))
        except TimeoutError as error:
            raise ProofError(Refusal.LATE) from error
        except OSError as error:
            raise ProofError(Refusal.CLOSED) from error
        if not part:
            raise ProofError(Refusal.CLOSED)
        data += part
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ProofError(Refusal.LATE)
    return left
