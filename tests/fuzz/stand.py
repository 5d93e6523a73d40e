"""A task without a job, for members that misbehave: real links, transports and services, and nothing behind them.

A member of a real job may end it, which is no defect; here whatever a visitor says is read, checked and dropped. Run as
a program: it prints one line of JSON with the address of each transport, and ends with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import sys
import threading
from typing import Any

from lockstep.doctor.listening import Inbox
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.events import Event
from lockstep.protocol.core.ids import BucketId, Incarnation, TaskId, server
from lockstep.protocol.core.messages import (
    Description,
    Envelope,
    Grant,
    Hello,
    Message,
    Note,
    Printed,
    Refused,
    Report,
    TransportAddress,
)
from lockstep.runtime.processes import die_with_parent
from lockstep.runtime.task.connection import Connection, Faults
from lockstep.runtime.trace.traffic import Traffic
from lockstep.security.chosen import chosen_key
from lockstep.transports.base import Loan
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.link import ControlLink, serve_links
from lockstep.transports.control.monitor_service import (
    add_monitor_service,
    inbox_handler,
    snapshot_handler,
    witness_handler,
)
from lockstep.transports.control.server import ControlServer
from lockstep.transports.registry import make_transport
from lockstep.version import __version__

TRANSPORTS = ("grpc", "grpc+shm", "grpc+tcp")
REGION_BYTES = 4096
MOST_TOLD = 4 << 20
_THREADS = 96


class Stand:
    """Implements ``runtime.task.connection.NodeSide``: every visitor gets a connection, as from a real task."""

    leaving = False
    forming = False

    def __init__(self, transport: str) -> None:
        self.task = server(0)
        self.incarnation: Incarnation = secrets.randbits(63) + 1
        self.traffic = Traffic()
        self.faults: Faults | None = None
        self._ended: queue.SimpleQueue[tuple[Connection, Reason]] = queue.SimpleQueue()
        self._server = ControlServer("127.0.0.1", 0, threads=_THREADS)
        self.transport = make_transport(transport, self._server, str(self.task), self.incarnation, chosen_key())
        self._region = self.transport.allocate(REGION_BYTES, "whatever comes")
        serve_links(self._server, self._on_hello, self._on_link)
        add_monitor_service(self._server, self._describe, Broadcast(), lambda: b"{}", max_watchers=16)
        said = {"Snapshot": snapshot_handler(lambda: b"{}"), "Witness": witness_handler(lambda task: task.encode())}
        self._server.add_handlers("Task", said)
        self._server.add_handlers("Doctor", {"Tell": inbox_handler(Inbox().take, MOST_TOLD)})
        self._server.start()
        self.address = self._server.address
        threading.Thread(target=self._bury, name="burying", daemon=True).start()

    def _on_hello(self, hello: Hello) -> Hello | Refused:
        try:
            TaskId.parse(hello.task)
        except ValueError as error:
            return Refused(Reason(Cause.WIRING, str(error)))
        return self.hello()

    def _on_link(self, hello: Hello, link: ControlLink) -> Connection:
        connection = Connection(self, TaskId.parse(hello.task), lambda one, why: self._ended.put((one, why)))
        connection.accept(link, hello)
        if connection.address is not None:
            connection.send(Grant(self.transport.grant(self._region, connection.address)))
        return connection

    def _bury(self) -> None:
        """Each on a thread of its own: one may take its time."""
        while True:
            connection, reason = self._ended.get()
            threading.Thread(target=connection.bury, args=(reason,), daemon=True).start()

    def _describe(self) -> Description:
        return Description(
            str(self.task), "", 0, 0, self.incarnation, "", 0.0, self.address, False, 0, __version__, 0, "", 0, 0.0
        )

    # -- what a connection needs --

    def hello(self) -> Hello:
        published = (TransportAddress(self.transport.name, self.transport.address()),)
        return Hello(str(self.task), self.incarnation, 0, __version__, published)

    def envelope(self, message: Message) -> Envelope:
        return Envelope(0, str(self.task), self.incarnation, message)

    def refuse(self, peer: TaskId, reason: str) -> None: ...

    def linked(self, peer: TaskId, path: str) -> None: ...

    def dials_next_life(self, peer: TaskId) -> bool:
        return False

    def tensors_in(self, bucket: BucketId) -> int:
        return 1

    def words_about(self, peer: TaskId, incarnation: Incarnation) -> list[Word]:
        return []

    def post(self, event: Event) -> None: ...

    def do(self, event: Event) -> None: ...

    def lent(self, peer: TaskId, incarnation: Incarnation, note: Note, loan: Loan) -> None:
        loan.release()

    def report_received(self, peer: TaskId, report: Report | Printed) -> bool:
        return True


def main() -> None:
    die_with_parent(os.getppid())
    stands: dict[str, Any] = {transport: Stand(transport) for transport in TRANSPORTS}
    sys.stdout.write(json.dumps({transport: stand.address for transport, stand in stands.items()}) + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
