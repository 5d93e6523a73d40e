"""A listening socket that hands over only connections whose other end has proven itself."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lockstep.security.proof import Parties, ProofError
from lockstep.security.strangers import Strangers
from lockstep.security.wire import FIRST_SECONDS, PROOF_SECONDS, Claim, ProvenSocket, accept

if TYPE_CHECKING:
    from lockstep.security.tls import PrivateEnds

PAUSE_SECONDS: Final = 0.1
"""Without a free descriptor or thread nobody can be let in; strangers leave soon."""
JOIN_SECONDS: Final = 10.0


class ProvenListener:
    """Each visitor has a thread, so one that says nothing, or one byte now and then, holds up nobody."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes | None,
        parties: Callable[[Claim], Parties],
        use: Callable[[ProvenSocket], None],
        name: str,
        refused: Callable[[str, ProofError], None] = lambda _, __: None,
        private: PrivateEnds | None = None,
    ) -> None:
        """``use`` has the connection from then on, and closes it; a ``ProofError`` from it closes it too. ``refused``:
        what to do about one that did not get that far, with its address. ``private``: all of it is encrypted."""
        self._listener = listener
        self._key = key
        self._parties = parties
        self._use = use
        self._refused = refused
        self._private = private
        self._name = name
        self._in_use: set[socket.socket] = set()
        self._strangers = Strangers()
        self._visits: list[threading.Thread] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._accept_one()
            except (OSError, RuntimeError):
                self._over.wait(PAUSE_SECONDS)

    def _accept_one(self) -> None:
        visitor, _ = self._listener.accept()
        visit = threading.Thread(target=self._let_in, args=(visitor,), name=f"{self._name}-visitor", daemon=True)
        self._visits = [*(one for one in self._visits if one.is_alive()), visit]
        try:
            visit.start()
        except RuntimeError:
            visitor.close()
            raise

    def _let_in(self, visitor: socket.socket) -> None:
        self._in_use.add(visitor)
        try:
            proven = self._prove(visitor)
            if proven is not None:
                self._use(proven)
        except BaseException as error:
            visitor.close()
            if not isinstance(error, ProofError):
                raise
        finally:
            self._in_use.discard(visitor)

    def _prove(self, visitor: socket.socket) -> ProvenSocket | None:
        where = _address_of(visitor)
        try:
            with self._strangers.place(lambda: _cut(visitor)) as place:
                return self._hear(visitor, place.spoke)
        except ProofError as error:
            visitor.close()
            if not self._over.is_set():
                self._refused(where, error)
            return None

    def _hear(self, visitor: socket.socket, spoke: Callable[[], object]) -> ProvenSocket:
        if self._private is None:
            return accept(visitor, self._key, self._parties, spoke=spoke)[1]
        began = time.monotonic()
        private = self._private.accept(visitor, began + FIRST_SECONDS, began + PROOF_SECONDS, spoke)
        return accept(private, self._key, self._parties, began + PROOF_SECONDS - time.monotonic(), spoke)[1]

    def close(self) -> None:
        """Listen no more, cut the connections in use, and wait for their threads; not from one of them."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends its accept
        self._thread.join(JOIN_SECONDS)
        self._listener.close()
        for visitor in list(self._in_use):
            _cut(visitor)
        for visit in self._visits:
            if visit.ident is not None:
                visit.join(JOIN_SECONDS)


def _address_of(visitor: socket.socket) -> str:
    try:
        return str(visitor.getpeername()[0])
    except OSError:
        return "somewhere"


def _cut(visitor: socket.socket) -> None:
    with contextlib.suppress(OSError):
        visitor.shutdown(socket.SHUT_RDWR)
