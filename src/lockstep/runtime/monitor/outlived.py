"""A task that stays although its job has ended: its monitor ends it by force.

A training thread that waits for a decoder, for a lock or inside native code does not notice the end of the job. The
task itself forces its end where any of its threads can run. Two cases are left to the monitor: a task that has reported
the end and does not get out, and a task whose threads do not run at all (stopped, or native code that keeps the
interpreter's lock). The latter never learns of the end; that all others have left shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.reach import Reach
from lockstep.protocol.core.timing import ASK_SECONDS, MUTE_SECONDS, OTHERS_GONE_SECONDS, OVERSTAY_SECONDS
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.transports.control.monitor_client import Unreachable, describe
from lockstep.transports.control.tcp_probe import probe


class Outlived:
    """Whether one task has outlived its job. ``look`` is called by the monitor's loop and never blocks."""

    def __init__(
        self, task: TaskId, record: TaskRecord, cluster: Sequence[tuple[str, str]], ended: Callable[[str, int], bool]
    ) -> None:
        """``ended``: whether the task at this address has left this job (``has_left``)."""
        self._record = record
        self._others = tuple(address for name, address in cluster if name != str(task))
        self._may_be_forced = task.role is Role.WORKER  # a server may still be writing a checkpoint
        self._ended = ended
        self._reported_at: float | None = None
        self._asking: threading.Thread | None = None
        self._gone_since: float | None = None

    def look(self, now: float) -> bool:
        """True once the task has to be ended."""
        report = self._record.report
        if report.over:
            self._reported_at = now if self._reported_at is None else self._reported_at
            return self._may_be_forced and report.must_leave and now - self._reported_at >= OVERSTAY_SECONDS
        self._reported_at = None
        if not report.job or self._record.silent_seconds() < MUTE_SECONDS:
            self._gone_since = None
            return False
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, args=(report.job,), name="outlived", daemon=True)
            self._asking.start()
        return self._gone_since is not None and now - self._gone_since >= OTHERS_GONE_SECONDS

    def _ask(self, job: int) -> None:
        """Ask the others, up to the first that is still there."""
        if self._others and all(self._ended(address, job) for address in self._others):
            if self._gone_since is None:
                self._gone_since = time.monotonic()
        else:
            self._gone_since = None


def has_left(address: str, job: int) -> bool:
    """Whether this monitor reports the end of its task or another job, or nothing listens there any more.

    A host that cannot be reached has not left: the network may be down, and the job may go on.
    """
    if (reach := probe(address).reach) is not Reach.OPEN:
        return reach is Reach.REFUSED
    try:
        found = describe(address, ASK_SECONDS)
    except Unreachable:
        return False
    return found.exited or found.job not in (0, job)
