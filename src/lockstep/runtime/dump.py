"""Files that a task leaves behind: its snapshot and journal, and the report, in the folder of the run.

The folder is the one that was asked for, or one under the temporary directory with the job's number in its name; it
is made when the first file is written. Files are written beside their place and moved there, so that nobody ever
reads half of one, and a disk that is full or a folder that is missing becomes a sentence, never an error.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.protocol.ids import TaskId

SNAPSHOT_SUFFIX = ".snapshot.json"


def run_folder(asked: str | None, job: int) -> Path:
    """Where the files of this run go."""
    if asked:
        return Path(asked)
    name = f"lockstep-{job:016x}" if job else f"lockstep-forming-{os.getpid()}"
    return Path(tempfile.gettempdir()) / name


def file_name(task: TaskId) -> str:
    """``worker-1.snapshot.json``."""
    return f"{task.role.value}-{task.index}{SNAPSHOT_SUFFIX}"


def write_files(folder: Path, files: Mapping[str, bytes]) -> str | None:
    """Write each file whole or not at all; the reason where that does not work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            beside = folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
            try:
                beside.write_bytes(data)
                os.replace(beside, folder / name)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror or error}"
    return None


def dump_bytes(snapshot: Mapping[str, Any], journal: list[dict[str, Any]], why: str) -> bytes:
    """The content of a dump: the snapshot with the journal in it, and why it was written."""
    return json.dumps({**snapshot, "why": why, "journal": journal}).encode()


def on_signal(signum: int, act: Callable[[], None]) -> None:
    """Call ``act`` on a thread of its own whenever ``signum`` comes. Call this before any other thread is started.

    A Python signal handler would run on the main thread, which is just the one that may be stuck.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})

    def wait() -> None:
        while True:
            signal.sigwait({signum})
            act()

    threading.Thread(target=wait, name="dump on a signal", daemon=True).start()
