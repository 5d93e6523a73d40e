"""A monitor's snapshot as a typed value."""

from __future__ import annotations

from lockstep.diagnose.views import MonitorView, SnapshotError, _load, _number, _object, _text, _whole, addresses_in
from lockstep.foreign import plain
from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.messages import Description


def read_monitor(data: bytes) -> MonitorView:
    """A monitor's snapshot; SnapshotError for anything else."""
    fields = _load(data, "monitor")
    found, process = _object(fields.get("description")), _object(fields.get("process"))
    stack, lack = _object(fields.get("stack")), fields.get("out_of_memory")
    return MonitorView(
        task=_text(found.get("task")),
        host=_text(found.get("host")),
        pid=_whole(found.get("pid")),
        incarnation=hex64(_whole(found.get("incarnation")) & (2**64 - 1)),
        job=hex64(_whole(found.get("job")) & (2**64 - 1)),
        version=_text(found.get("version")),
        phase=_text(found.get("phase")),
        phase_seconds=_number(found.get("phase_seconds")),
        task_address=_text(found.get("task_address")),
        exited=found.get("exited") is True,
        exit_code=_whole(found.get("exit_code")),
        state=_text(process.get("state")),
        stopped=_number(fields.get("stopped_seconds"), -1.0),
        out_of_memory=plain(lack) if isinstance(lack, str) else None,
        reason=_text(fields.get("reason")),
        on_device=fields.get("on_device") is True,
        silent=_number(fields.get("silent_seconds"), -1.0),
        stack=_main_thread(stack.get("text")),
        resident=_whole(process.get("resident_bytes")),
        cluster=addresses_in(fields),
    )


def _main_thread(text: object) -> tuple[str, ...]:
    """The main thread's lines from py-spy's listing of all threads, which starts with the command line."""
    threads = text.split("\nThread ")[1:] if isinstance(text, str) else []
    chosen = next((thread for thread in threads if '"MainThread"' in thread.partition("\n")[0]), "")
    return tuple(plain(line.strip(), 500) for line in chosen.splitlines()[1:40] if line.strip())


def from_description(found: Description) -> MonitorView:
    """What ``Describe`` alone contains."""
    return MonitorView(
        task=found.task,
        host=found.host,
        pid=found.pid,
        incarnation=hex64(found.incarnation),
        job=hex64(found.job),
        version=found.version,
        phase=found.phase,
        phase_seconds=found.phase_seconds,
        task_address=found.task_address,
        exited=found.exited,
        exit_code=found.exit_code,
    )


__all__ = ["MonitorView", "SnapshotError", "from_description", "read_monitor"]
