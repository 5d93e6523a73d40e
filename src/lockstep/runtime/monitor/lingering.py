"""How long a monitor answers for a task that has ended."""

from __future__ import annotations

import time

from lockstep.protocol.timing import ANSWERED_FOR_SECONDS, TELL_SECONDS
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.processes import SignalInbox, wait_readable


def linger(record: TaskRecord, number: int, quiet: bool, seconds: float, inbox: SignalInbox | None) -> None:
    """Wait until those who watch have got change ``number``, the end of the task, or a signal comes to ``inbox``.

    After a quiet end that is all. After a failure it takes up to ``seconds``, and is cut short only where there were
    watchers.
    """
    ended = time.monotonic()
    watched = False
    while True:
        waited = time.monotonic() - ended
        watched = watched or record.changed.watchers() > 0
        told = record.changed.everyone_has(number)
        if quiet and (told or waited >= TELL_SECONDS):
            return
        if waited >= seconds or (watched and told and waited >= ANSWERED_FOR_SECONDS):
            return
        wait_readable(set() if inbox is None else {inbox.fileno()}, 0.02)
        if inbox is not None and inbox.take():
            return
