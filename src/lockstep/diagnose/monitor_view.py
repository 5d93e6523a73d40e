"""A monitor's snapshot as a typed value."""

from __future__ import annotations

from lockstep.diagnose.fields import SnapshotError, addresses_in, load_fields, number_of, object_of, text_of, whole_of
from lockstep.diagnose.task_view import read_refused
from lockstep.diagnose.views import MonitorView
from lockstep.foreign import plain
from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.messages import Description


def read_monitor(data: bytes) -> MonitorView:
    """A monitor's snapshot; SnapshotError for anything else."""
    fields = load_fields(data, "monitor")
    found, process = object_of(fields.get("description")), object_of(fields.get("process"))
    stack, lack = object_of(fields.get("stack")), fields.get("out_of_memory")
    return MonitorView(
        task=text_of(found.get("task")),
        host=text_of(found.get("host")),
        pid=whole_of(found.get("pid")),
        incarnation=hex64(whole_of(found.get("incarnation")) & (2**64 - 1)),
        job=hex64(whole_of(found.get("job")) & (2**64 - 1)),
        version=text_of(found.get("version")),
        phase=text_of(found.get("phase")),
        phase_seconds=number_of(found.get("phase_seconds")),
        task_address=text_of(found.get("task_address")),
        exited=found.get("exited") is True,
        exit_code=whole_of(found.get("exit_code")),
        state=text_of(process.get("state")),
        stopped=number_of(fields.get("stopped_seconds"), -1.0),
        out_of_memory=plain(lack) if isinstance(lack, str) else None,
        reason=text_of(fields.get("reason")),
        on_device=fields.get("on_device") is True,
        silent=number_of(fields.get("silent_seconds"), -1.0),
        stack=_main_thread(stack.get("text")),
        resident=whole_of(process.get("resident_bytes")),
        cluster=addresses_in(fields),
        refused=read_refused(fields),
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
