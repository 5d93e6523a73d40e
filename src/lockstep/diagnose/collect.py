"""Asks every task of a cluster, and its monitor, what they know; within a bounded time, whoever is gone.

A task that does not answer costs its deadline and nothing more, because all are asked at once. First a plain TCP
connection is tried: it tells "nothing listens" from "no packet comes back".
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final

from lockstep.diagnose import phrases
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.monitor_view import from_description, read_monitor
from lockstep.diagnose.views import MonitorView, SnapshotError, TaskView, read_task
from lockstep.protocol.reach import NOT_SILENT, Reach, Silence
from lockstep.protocol.timing import PROBE_SECONDS
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.wire.channels import open_channel
from lockstep.transports.wire.codec import WireError, decode_description, decode_snapshot
from lockstep.transports.wire.reasons import probe
from lockstep.transports.wire.server import method_path

ASKED_AT_ONCE: Final = 128


def collect(
    addresses: Mapping[str, str], seconds: float, known: Mapping[str, TaskView] | None = None
) -> dict[str, Seen]:
    """What is found at each address. ``known``: views that need not be asked for (the asker's own).

    Takes at most about three times ``seconds``; in a cluster where everybody answers, some milliseconds.
    """
    if not addresses:
        return {}
    pool = ThreadPoolExecutor(min(ASKED_AT_ONCE, len(addresses)), thread_name_prefix="collect")
    try:
        asked = {
            task: pool.submit(look_at, task, address, seconds, (known or {}).get(task))
            for task, address in addresses.items()
        }
        wait(asked.values(), timeout=3 * seconds + PROBE_SECONDS)
        late = Silence(Reach.MUTE, phrases.late())
        return {
            task: future.result()
            if future.done()
            else Seen(task=task, address=addresses[task], silence=late, monitor_silence=late)
            for task, future in asked.items()
        }
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def look_at(task: str, address: str, seconds: float, known: TaskView | None = None) -> Seen:
    """One task: its monitor at ``address``, then the task itself where the monitor says that it listens."""
    refused = probe(address, min(PROBE_SECONDS, seconds))
    if refused is not None:
        return Seen(task=task, address=address, view=known, silence=refused, monitor_silence=refused)
    monitor, silence = _ask_monitor(address, seconds)
    seen = Seen(task=task, address=address, monitor=monitor, monitor_silence=silence, view=known)
    if known is not None:
        return seen
    if monitor is None:
        return replace(seen, silence=silence)
    if monitor.exited or not monitor.task_address or monitor.task != task:
        return replace(seen, silence=Silence(Reach.BROKEN, phrases.does_not_listen()))
    view, why = _ask_task(monitor.task_address, seconds)
    return replace(seen, view=view, silence=why)


def _ask_monitor(address: str, seconds: float) -> tuple[MonitorView | None, Silence]:
    with open_channel(address) as channel:
        try:
            data = channel.unary_unary(method_path("Monitor", "Describe"))(b"", timeout=seconds)
            described = from_description(decode_description(data))
        except grpc.RpcError as error:
            return None, _why(error, address, seconds)
        except WireError as error:
            return None, Silence(Reach.BROKEN, phrases.unreadable(address, str(error)))
        try:
            more = decode_snapshot(channel.unary_unary(method_path("Monitor", "Snapshot"))(b"", timeout=seconds))
            return read_monitor(more), NOT_SILENT
        except (grpc.RpcError, WireError, SnapshotError):
            return described, NOT_SILENT


def _ask_task(address: str, seconds: float) -> tuple[TaskView | None, Silence]:
    with open_channel(address) as channel:
        try:
            data = decode_snapshot(channel.unary_unary(method_path("Task", "Snapshot"))(b"", timeout=seconds))
            return read_task(data), NOT_SILENT
        except grpc.RpcError as error:
            return None, _why(error, address, seconds)
        except (WireError, SnapshotError) as error:
            return None, Silence(Reach.BROKEN, phrases.unreadable(address, str(error)))


def fetch_stack(address: str, seconds: float) -> tuple[str, ...]:
    """The Python stack of the task behind the monitor at ``address``; empty where there is none."""
    with open_channel(address) as channel:
        try:
            data = decode_snapshot(channel.unary_unary(method_path("Monitor", "Stack"))(b"", timeout=seconds))
            return read_monitor(data).stack
        except (grpc.RpcError, WireError, SnapshotError):
            return ()


def _why(error: grpc.RpcError, address: str, seconds: float) -> Silence:
    """As ``reasons.explain``, but quick: a port that a firewall hides must not pass for a task that is stuck."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return probe(address, PROBE_SECONDS) or Silence(Reach.MUTE, phrases.mute(address, seconds))
    return Silence(Reach.BROKEN, phrases.call_failed(address, error.details() or error.code().name))
