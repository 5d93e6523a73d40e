"""What a task writes to the run folder, its snapshot and journal; and the signal that triggers it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.protocol.ids import TaskId

SNAPSHOT_SUFFIX = ".snapshot.json"


def file_name(task: TaskId) -> str:
    """``worker-1.snapshot.json``."""
    return f"{task.role.value}-{task.index}{SNAPSHOT_SUFFIX}"


def dump_bytes(snapshot: Mapping[str, Any], journal: list[dict[str, Any]], why: str) -> bytes:
    """The content of a dump: the snapshot with the journal in it, and why it was written."""
    return json.dumps({**snapshot, "why": why, "journal": journal}).encode()


def on_signal(signum: int, act: Callable[[], None]) -> None:
    """Call ``act`` on its own thread whenever ``signum`` arrives. Call this before any other thread is started.

    A Python signal handler would run on the main thread, which is just the one that may be stuck.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def wait() -> None:
        while True:
            signal.sigwait({signum})
            act()

    threading.Thread(target=wait, name="dump on a signal", daemon=True).start()
