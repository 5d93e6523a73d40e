"""TLS over one connection, where both ends show certificates of the job (``certificates.py``).

The socket stays a plain one, which others may poll and cut: what is encrypted passes through memory. So a large call to
the kernel takes many records, nothing that waits to be decrypted is hidden from whoever polls, and reading never has to
write first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, cast

from lockstep.security.certificates import NAME, Certificates
from lockstep.security.proof import ProofError, Refusal

SHAKING_BYTES: Final = 16 << 10
"""No more is taken from somebody who has not shown a certificate yet; a chain of three has about a third of it."""
_SOME: Final = 4 << 10
_ALERT_SECONDS: Final = 0.1
_OTHER_KEY: Final = frozenset(
    {
        "CERTIFICATE_VERIFY_FAILED",
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_DECRYPT_ERROR",
    }  # both names of authorities: one
)
_UNPROVEN: Final = frozenset(
    {
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    }
)
"""What OpenSSL calls it, at the end that refuses or at the other one."""


class PrivateConnection:
    """A connection in TLS. Any two threads may send and receive at the same time."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.socket = connection
        self._coming, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if accepts else NAME
        self._tls = context.wrap_bio(self._coming, self._leaving, server_side=accepts, server_hostname=name)
        self._lock = threading.Lock()  # OpenSSL wants one thread at a time, whatever it does
        self._deadline = 0.0

    # --- before the proof, and for it: these wait, as those of a socket do ----------------------------------------

    def shake_hands(self, first: float, deadline: float, spoke: Callable[[], object] = lambda: None) -> None:
        """``ProofError`` if the other end does not show a certificate of the job before the deadline, or nothing at all
        before ``first``. ``spoke`` is called when what it said first makes sense."""
        self._deadline, received, done = first, 0, False
        try:
            while not done:
                done = self._shake()
                self._flush()
                if done or received > SHAKING_BYTES:
                    break
                if received:
                    self._deadline = deadline
                    spoke()
                received += self._receive_some()
        except ssl.SSLError as error:
            self._deadline = time.monotonic() + _ALERT_SECONDS
            with contextlib.suppress(OSError):
                self._flush()  # OpenSSL tells the other end why
            raise ProofError(_refusal_of(error)) from error
        except TimeoutError as error:
            raise ProofError(Refusal.LATE) from error
        except OSError as error:
            raise ProofError(Refusal.CLOSED) from error
        if not done:
            raise ProofError(Refusal.MALFORMED)

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def settimeout(self, seconds: float) -> None:
        """For all that the next call waits for."""
        self._deadline = time.monotonic() + seconds

    def sendall(self, data: bytes) -> None:
        with self._lock:
            self._tls.write(data)
        self._flush()

    def recv(self, most: int) -> bytes:
        while True:
            try:
                with self._lock:
                    return self._tls.read(most)
            except ssl.SSLWantReadError:
                self._receive_some()
            except ssl.SSLError as error:
                raise ProofError(_refusal_of(error)) from error

    def _flush(self) -> None:
        with self._lock:
            leaving = self._leaving.read()
        if leaving:
            self.socket.settimeout(self._left())
            self.socket.sendall(leaving)

    def _receive_some(self) -> int:
        self.socket.settimeout(self._left())
        came = self.socket.recv(_SOME)
        if not came:
            raise ProofError(Refusal.CLOSED)
        self.feed(memoryview(came))
        return len(came)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    # --- afterwards: these never wait -----------------------------------------------------------------------------

    def encrypt(self, *pieces: memoryview) -> bytes:
        """What has to be sent for these pieces, one after the other."""
        with self._lock:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    at += self._tls.write(piece[at:])
            return self._leaving.read()

    def feed(self, came: memoryview) -> None:
        """Take what has been received."""
        with self._lock:
            self._coming.write(came)

    def decrypt(self, into: memoryview) -> int:
        """How many bytes of what has been taken are whole, and in place now. ``OSError``: somebody has changed it."""
        at = 0
        with self._lock, contextlib.suppress(ssl.SSLWantReadError):
            while at < len(into):
                at += cast(int, self._tls.read(len(into) - at, into[at:]))
        return at


class PrivateEnds:
    """Makes connections private; each end shows a certificate of the job, and demands one."""

    def __init__(self, own: Certificates) -> None:
        self._dialing = _context(ssl.PROTOCOL_TLS_CLIENT, own)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, own)
        self._accepting.verify_mode = ssl.CERT_REQUIRED
        self._accepting.num_tickets = 0  # no connection resumes another one

    def dial(self, connection: socket.socket, deadline: float) -> PrivateConnection:
        """The dialer's part. ``ProofError``: the other end is refused; the caller closes the socket."""
        private = PrivateConnection(connection, self._dialing, accepts=False)
        private.shake_hands(deadline, deadline)
        return private

    def accept(
        self, connection: socket.socket, first: float, deadline: float, spoke: Callable[[], object]
    ) -> PrivateConnection:
        """The acceptor's part."""
        private = PrivateConnection(connection, self._accepting, accepts=True)
        private.shake_hands(first, deadline, spoke)
        return private


def _context(side: int, own: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=own.authority.decode())
    # It reads files only: this one is in memory, and nobody else's.
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, own.private + b"\n" + own.certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def _refusal_of(error: ssl.SSLError) -> Refusal:
    reason = error.reason or ""
    if reason in _OTHER_KEY:
        return Refusal.OTHER_KEY
    return Refusal.UNPROVEN if reason in _UNPROVEN else Refusal.MALFORMED
