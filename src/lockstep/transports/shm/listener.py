"""Where peers on this host connect: a listening socket without a file, and a thread that accepts them."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from lockstep.protocol.core.timing import HELLO_SECONDS
from lockstep.transports.frame_error import FrameError
from lockstep.transports.shm.frames import pack_fault
from lockstep.transports.shm.handshake import IncomingPeer, check_user, listen_to
from lockstep.transports.shm.host import HostPlace, door_address
from lockstep.transports.shm.signal_socket import Signals


class SignalListener:
    """Accepts connections until it is closed. ``admit`` runs on a separate thread per visitor and may wait."""

    def __init__(self, place: HostPlace, task: str, admit: Callable[[IncomingPeer], None]) -> None:
        self._admit = admit
        self._task = task
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.bind(door_address(place))
        self._socket.listen(128)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"shm-door-{task}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while all(descriptor != self._stop for descriptor, _ in poller.poll()):
            connection, _ = self._socket.accept()
            name = f"shm-visitor-{self._task}"
            threading.Thread(target=self._let_in, args=(connection,), name=name, daemon=True).start()

    def _let_in(self, connection: socket.socket) -> None:
        signals = Signals(connection)
        try:
            check_user(connection, "the visitor")
            visitor = listen_to(signals, time.monotonic() + HELLO_SECONDS)
            try:
                self._admit(visitor)
            except FrameError:
                visitor.close_descriptors()
                raise
        except FrameError as refusal:
            signals.send(pack_fault(str(refusal)))
            signals.close()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(5.0)
        self._socket.close()
        os.close(self._stop)


def connect(place: HostPlace, task: str) -> Signals:
    """Connect to the door of a peer; ``FrameError`` says why not."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(HELLO_SECONDS)
        connection.connect(door_address(place))
        check_user(connection, task)
    except OSError as error:
        connection.close()
        raise FrameError(f"{task} does not answer on this host ({error.strerror or error}); it has ended") from error
    except FrameError:
        connection.close()
        raise
    return Signals(connection)
