"""Where peers on this host connect: a listening socket without a file, and a thread that accepts them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from lockstep.protocol.core.timing import HELLO_SECONDS
from lockstep.security.proof import ProofError, Refusal
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.strangers import Strangers
from lockstep.transports.frame_error import FrameError
from lockstep.transports.shm.frames import SignalKind, pack_fault, pack_opening
from lockstep.transports.shm.handshake import IncomingPeer, check_user, peer_of
from lockstep.transports.shm.host import HostPlace, door_address
from lockstep.transports.shm.signal_socket import Signals

STRANGERS: Final = 8
PAUSE_MS: Final = 100
"""Without a free descriptor no visitor can be let in; soon there may be one."""


class SignalListener:
    """Accepts connections until it is closed. Each visitor has a thread: ``identify`` finds out who it is (and
    calls back when it has spoken), ``admit`` may wait until it is expected."""

    def __init__(
        self,
        place: HostPlace,
        task: str,
        identify: Callable[[Signals, Callable[[], None]], IncomingPeer],
        admit: Callable[[IncomingPeer], None],
    ) -> None:
        self._identify = identify
        self._admit = admit
        self._task = task
        self._strangers = Strangers(STRANGERS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.bind(door_address(place))
        self._socket.listen(128)
        self._socket.setblocking(False)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"shm-door-{task}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller, ending = select.poll(), select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        ending.register(self._stop, select.POLLIN)
        while all(descriptor != self._stop for descriptor, _ in poller.poll()):
            try:
                self._accept_one()
            except (OSError, RuntimeError):  # no descriptor or no thread is free now
                ending.poll(PAUSE_MS)

    def _accept_one(self) -> None:
        connection, _ = self._socket.accept()
        name = f"shm-visitor-{self._task}"
        try:
            threading.Thread(target=self._let_in, args=(connection,), name=name, daemon=True).start()
        except RuntimeError:
            connection.close()
            raise

    def _let_in(self, connection: socket.socket) -> None:
        signals = visitor = None
        try:
            check_user(connection, "the visitor")
            signals = Signals(connection)
            with self._strangers.place(lambda: _cut(connection)) as place:
                visitor = self._identify(signals, place.spoke)
            self._admit(visitor)
        except FrameError as fault:
            if visitor is None:
                _say_refused(connection, fault.refusal)
            _turn_away(connection, signals, pack_fault(str(fault)))
        except ProofError as error:
            _say_refused(connection, error.refusal)
            _turn_away(connection, signals, pack_opening(SignalKind.REFUSED, error.refusal.value.encode()))
        except OSError:  # no descriptor is free
            _turn_away(connection, signals, b"")

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._strangers.cut_all()
        self._thread.join(5.0)
        self._socket.close()
        os.close(self._stop)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _say_refused(connection: socket.socket, refusal: Refusal) -> None:
    with contextlib.suppress(OSError):
        process, user = peer_of(connection)
        REFUSALS.note(Entrance.DOOR, "", f"user {user} (process {process})", refusal)


def _turn_away(connection: socket.socket, signals: Signals | None, last: bytes) -> None:
    """Say why, and leave no descriptor behind."""
    if signals is None:
        with contextlib.suppress(OSError):
            connection.send(last, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        connection.close()
        return
    signals.send(last)
    signals.close()


def connect(place: HostPlace, task: str) -> Signals:
    """Connect to the door of a peer; ``FrameError`` says why not."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(HELLO_SECONDS)
        connection.connect(door_address(place))
        check_user(connection, task)
        return Signals(connection)
    except OSError as error:
        connection.close()
        raise FrameError(f"{task} does not answer on this host ({error.strerror or error}); it has ended") from error
    except FrameError:
        connection.close()
        raise
