"""Asks every task of a cluster, and its monitor, what they know; within a bounded time, even if some are gone.

A task that does not answer costs its deadline and nothing more, because all are asked at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final

from lockstep.diagnose import phrases
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.fields import SnapshotError
from lockstep.diagnose.monitor_view import from_description, read_monitor
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.views import MonitorView, TaskView
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import NOT_SILENT, Reach, Silence
from lockstep.protocol.core.timing import PROBE_ALL_SECONDS
from lockstep.transports.control import monitor_client
from lockstep.transports.control.addresses import AddressError, is_local_address, nothing_listens, parse_address
from lockstep.transports.control.monitor_client import Unreachable, fetch_snapshot, seconds_left
from lockstep.transports.control.monitor_query import query_monitor_quickly

ASKED_AT_ONCE: Final = 128


def collect(
    addresses: Mapping[str, str], seconds: float, known: Mapping[str, TaskView] | None = None, *, together: bool = False
) -> dict[str, Seen]:
    """What is found at each address. ``known``: views that need not be asked for (the asker's own).

    Takes at most about three times ``seconds``, which is for one question, or with ``together`` for all questions to
    one address; in a cluster where everybody answers, some milliseconds.
    """
    if not addresses:
        return {}
    pool = ThreadPoolExecutor(min(ASKED_AT_ONCE, len(addresses)), thread_name_prefix="collect")
    try:
        asked = {
            task: pool.submit(look_at, task, address, seconds, (known or {}).get(task), together=together)
            for task, address in addresses.items()
        }
        wait(asked.values(), timeout=(1 if together else 3) * seconds + PROBE_ALL_SECONDS)
        # That the time was not enough to ask it tells nothing of the task.
        late = Silence(Reach.NOT_ASKED, phrases.late())
        return {
            task: future.result()
            if future.done()
            else Seen(task=task, address=addresses[task], silence=late, monitor_silence=late)
            for task, future in asked.items()
        }
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def look_at(task: str, address: str, seconds: float, known: TaskView | None = None, *, together: bool = False) -> Seen:
    """One task: its monitor at ``address``, then the task itself, at the address that the monitor gives."""
    deadline = time.monotonic() + seconds if together else math.inf
    answer = query_monitor_quickly(address, seconds, deadline)
    if answer.description is None:
        silence = answer.found.silence(address)
        # Where this is its own host, the kernel knows.
        words = {task: Word.ABSENT} if is_absent(address, silence.reach) else {}
        return Seen(task=task, address=address, view=known, silence=silence, monitor_silence=silence, words=words)
    monitor = _view_of(answer.description, answer.snapshot)
    seen = Seen(task=task, address=address, monitor=monitor, monitor_silence=NOT_SILENT, view=known)
    if known is not None:
        return seen
    if monitor.exited or not monitor.task_address or monitor.task != task:
        return replace(seen, silence=Silence(Reach.BROKEN, phrases.does_not_listen()))
    view, why = _ask_task(monitor.task_address, seconds_left(seconds, deadline))
    return replace(seen, view=view, silence=why)


def is_absent(address: str, reach: Reach) -> bool:
    """Whether this is the host of that address and nothing listens there: a refusal alone may be a firewall's."""
    if reach is not Reach.REFUSED:
        return False
    try:
        place = parse_address(address)
        return is_local_address(place.host) and nothing_listens(place.port)
    except AddressError:
        return False


def _view_of(description: Description, snapshot: bytes) -> MonitorView:
    try:
        return read_monitor(snapshot)
    except SnapshotError:
        return from_description(description)


def _ask_task(address: str, seconds: float) -> tuple[TaskView | None, Silence]:
    try:
        return read_task(fetch_snapshot(address, "Task", seconds, PROBE_ALL_SECONDS)), NOT_SILENT
    except Unreachable as error:
        return None, error.silence
    except SnapshotError as error:
        return None, Silence(Reach.BROKEN, phrases.unreadable(address, str(error)))


def fetch_stack(address: str, seconds: float) -> tuple[str, ...]:
    """The Python stack of the task behind the monitor at ``address``; empty where there is none."""
    try:
        return read_monitor(monitor_client.fetch_stack(address, seconds, probe_seconds=0.0)).stack
    except (Unreachable, SnapshotError):
        return ()
