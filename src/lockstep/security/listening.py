"""A listening socket that hands over only connections whose other end has proven itself."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

from lockstep.security.proof import Parties, ProofError
from lockstep.security.strangers import Strangers
from lockstep.security.wire import Claim, ProvenSocket, accept

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
    ) -> None:
        """``use`` has the connection from then on, and closes it; a ``ProofError`` from it closes it too."""
        self._listener = listener
        self._key = key
        self._parties = parties
        self._use = use
        self._name = name
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
        try:
            with self._strangers.place(lambda: _cut(visitor)) as place:
                _, proven = accept(visitor, self._key, self._parties, spoke=place.spoke)
            self._use(proven)
        except ProofError:
            visitor.close()
        except BaseException:
            visitor.close()
            raise

    def close(self) -> None:
        """Listen no more. Waits for visitors, strangers excepted; not from one of their threads."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends its accept
        self._thread.join(JOIN_SECONDS)
        self._listener.close()
        self._strangers.cut_all()
        for visit in self._visits:
            if visit.ident is not None:
                visit.join(JOIN_SECONDS)


def _cut(visitor: socket.socket) -> None:
    with contextlib.suppress(OSError):
        visitor.shutdown(socket.SHUT_RDWR)
