"""A task that was refused before it started (a bad flag, a missing folder): its address answers why, for a while."""

from __future__ import annotations

import os
import signal

from lockstep.errors import EXIT_BAD_INPUT
from lockstep.protocol.core.timing import LINGER_SECONDS
from lockstep.runtime.monitor.exit import linger
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport, plain_reason
from lockstep.runtime.monitor.service import MonitorService
from lockstep.runtime.processes import STOP_SIGNALS, SignalInbox
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.transports.control.server import ListenError


def answer_for_refused(cluster: ClusterSpec, version: str, reason: str, seconds: float = LINGER_SECONDS) -> None:
    """Blocks for ``seconds``, or until a signal; returns at once where the address cannot be listened on.

    Without it the other tasks find nothing there, and report that this one was never started.
    """
    assert cluster.task is not None
    listen = cluster.listen_address()
    record = TaskRecord(str(cluster.task), version, os.getpid(), cluster.all_addresses())
    record.on_started(os.getpid())
    record.on_report(TaskReport(reason=plain_reason(reason)))
    number = record.on_exited(EXIT_BAD_INPUT)
    with SignalInbox((*STOP_SIGNALS, signal.SIGUSR1), until_exit=True) as inbox:
        try:
            service = MonitorService(listen.host, listen.port, record)
        except ListenError:
            return  # the port is taken, or the address is not one of this machine: that may be the very reason
        try:
            linger(record, number, quiet=False, seconds=seconds, inbox=inbox)
        finally:
            service.close()
