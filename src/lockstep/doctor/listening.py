"""A doctor answers at the address of its task, as the task's monitor would, so that others can try to reach it.

It also listens at a second port (of ``--ports``, or a free one), for which the kernel answers: tasks do that too, and
some firewalls let only the listed ports through.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from typing import Any, Final

from lockstep.doctor.facts import DOCTOR_PHASE, Shared, Visit, shared_to_json, visits_to_json
from lockstep.foreign import read_json
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Description
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.security.refusals import Entrance
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.monitor_service import add_monitor_service, inbox_handler
from lockstep.transports.control.ports import listen_at
from lockstep.transports.control.server import ControlServer

_THREADS: Final = 48
_WATCHERS: Final = 8
_BACKLOG: Final = 128
_MOST_BYTES: Final = 4 << 20
_MOST_TELLERS: Final = 1000
SERVICE: Final = "Doctor"


class Notes:
    """What this doctor reports to others; filled in as it learns more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._visits: tuple[Visit, ...] = ()
        self._shared: Shared | None = None
        self._done = False

    def write(self, visits: tuple[Visit, ...], shared: Shared | None, done: bool) -> None:
        with self._lock:
            self._visits, self._shared, self._done = visits, shared, done

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            shared = None if self._shared is None else shared_to_json(self._shared)
            return {"visits": visits_to_json(self._visits), "shared": shared, "done": self._done}


class Inbox:
    """The latest report that each of the other doctors sent: they may reach us even if we do not reach them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, dict[str, Any]] = {}
        self._heard_at: dict[str, float] = {}
        self._first_heard_at: dict[str, float] = {}

    def take(self, data: bytes) -> None:
        try:
            said = read_json(data, _MOST_BYTES)
            teller = str(TaskId.parse(said["start"]["task"]))
        except (ValueError, TypeError, KeyError):
            return
        with self._lock:
            if len(self._told) < _MOST_TELLERS:
                self._told[teller] = said
                self._heard_at[teller] = time.monotonic()
                self._first_heard_at.setdefault(teller, self._heard_at[teller])

    def heard_at(self, teller: str) -> float:
        """When this doctor's latest report arrived, by this machine's monotonic clock; 0 if none did."""
        with self._lock:
            return self._heard_at.get(teller, 0.0)

    def first_heard_at(self) -> dict[str, float]:
        """When the first report of each doctor arrived."""
        with self._lock:
            return dict(self._first_heard_at)

    def told(self) -> dict[str, dict[str, Any]]:
        """The reports, by the name of the task that the other doctor examines."""
        with self._lock:
            return dict(self._told)


class Stand:
    """Answers for one task until ``close``. Raises ``ListenError`` or ``PortTaken``."""

    def __init__(self, spec: ClusterSpec, start: StartFacts, notes: Notes, inbox: Inbox) -> None:
        listen = spec.listen_address()
        self.nonce = secrets.randbits(63) + 1
        self._start = start
        self._notes = notes
        self._since = time.monotonic()
        self._changed = Broadcast()
        self._server = ControlServer(listen.host, listen.port, threads=_THREADS, entrance=Entrance.DOCTOR)
        add_monitor_service(self._server, self._describe, self._changed, self.snapshot, max_watchers=_WATCHERS)
        self._server.add_handlers(SERVICE, {"Tell": inbox_handler(inbox.take, _MOST_BYTES)})
        self._server.start()
        own_host = spec.address_of(spec.task).rpartition(":")[0] if spec.task is not None else listen.host
        self._side = listen_at(listen.host, spec.second_ports, _BACKLOG)
        self._side_address = f"{own_host}:{self._side.getsockname()[1]}"

    def _describe(self) -> Description:
        return Description(
            task=self._start.task,
            host=socket.gethostname(),
            monitor_pid=os.getpid(),
            pid=os.getpid(),
            incarnation=self.nonce,
            phase=DOCTOR_PHASE,
            phase_seconds=time.monotonic() - self._since,
            task_address="",
            exited=False,
            exit_code=0,
            version=self._start.version,
            job=0,
        )

    def snapshot(self) -> bytes:
        """What it reports to anyone who asks."""
        own = {"format": 1, "kind": "doctor", "time": time.time(), "start": self._start.to_json()}
        own["host"] = socket.gethostname()
        return json.dumps({**own, "side": self._side_address, **self._notes.to_json()}).encode()

    def close(self) -> None:
        self._changed.close()
        self._server.stop(0.2)
        self._side.close()
