"""Serves a record on the network: the monitor's gRPC server, and its snapshot."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Final

from lockstep.diagnose.fields import FORMAT
from lockstep.runtime.monitor.freezer import task_facts
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.stack import StackTaker
from lockstep.runtime.processes import uses_device
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.transports.control.monitor_service import add_monitor_service, snapshot_handler
from lockstep.transports.control.server import ControlServer

_MAX_WATCHERS: Final = 1024
_QUESTIONS: Final = 16
"""Threads in addition to those of the watchers; they are created only when needed."""

_STREAM_END_SECONDS: Final = 0.5


class MonitorService:
    """Answers at one address from construction on, until ``close``. Raises ``ListenError`` or ``PortTaken``."""

    def __init__(self, host: str, port: int, record: TaskRecord, start: StartFacts | None = None) -> None:
        self._record = record
        self._start = start
        self._stacks = StackTaker()
        self._server = ControlServer(host, port, threads=_MAX_WATCHERS + _QUESTIONS, entrance=Entrance.MONITOR)
        add_monitor_service(self._server, record.describe, record.changed, self.snapshot, max_watchers=_MAX_WATCHERS)
        self._server.add_handlers("Monitor", {"Stack": snapshot_handler(self.snapshot_with_stack)})
        self._server.start()

    @property
    def address(self) -> str:
        return self._server.address

    def snapshot(self) -> bytes:
        """What is known from outside: the kernel's view of the process. Fast: in trouble, every task asks for it."""
        return self._snapshot(with_stack=False)

    def snapshot_with_stack(self) -> bytes:
        """The same with the task's Python stack, even if it is frozen; takes up to two seconds."""
        return self._snapshot(with_stack=True)

    def _snapshot(self, with_stack: bool) -> bytes:
        record = self._record
        alive = record.pid != 0 and record.exit_code is None
        facts = task_facts(record.pid) if alive else None
        if facts is not None:
            record.on_state(stopped=facts.stopped)
        stack = self._stacks.take(record.pid) if alive and with_stack else None
        fields = {
            "format": FORMAT,
            "kind": "monitor",
            "time": time.time(),
            "description": asdict(record.describe()),
            "start": None if self._start is None else self._start.to_json(),
            "cluster": dict(record.cluster),
            "phases": [{"phase": phase, "began_seconds_ago": round(ago, 3)} for phase, ago in record.history()],
            "process": asdict(facts) if facts else None,
            "stopped_seconds": record.stopped_seconds() if alive else -1.0,
            "on_device": alive and uses_device(record.pid),
            "silent_seconds": record.silent_seconds(),
            "out_of_memory": record.out_of_memory,
            "reason": record.report.reason,
            "stack": asdict(stack) if stack else None,
            "refused": REFUSALS.summary(),
        }
        return json.dumps(fields).encode()

    def close(self) -> None:
        """End the streams properly and free the port."""
        self._record.changed.close()
        self._server.stop(_STREAM_END_SECONDS)
