"""What the processes of one run hold in memory together, looked at from outside while they run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

MARK = "OWN_PROGRAM_RUN"
"""Every process of a run has this variable, those of a Lockstep task's monitor included."""
EVERY_SECONDS = 3.0
_GPU = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class MemoryWatch:
    """Use it in a ``with`` block around a run.

    Memory that two processes share counts once: each page is divided by the number of processes that have it (``Pss``).
    On a GPU the timed steps are over within a second or two, and looking takes a process' lock: there ``look`` is
    called once, while the processes wait after their last step.
    """

    def __init__(self, mark: str, gpu: bool) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._alone = not gpu
        self._gpu = gpu and shutil.which(_GPU[0]) is not None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self.peak = 0
        """Bytes of the host's memory, of all processes together."""
        self.gpu_peak = 0
        """Bytes of the first GPU in use by anyone, contexts and caches included."""

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            if self._alone:
                self.look()

    def look(self) -> None:
        self.peak = max(self.peak, sum(_share(process) for process in self._processes()))
        if self._gpu:
            self.gpu_peak = max(self.gpu_peak, _gpu_used())

    def _processes(self) -> list[Path]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.stat().st_uid == os.getuid() and self._mark in (process / "environ").read_bytes():
                    found.append(process)
        return found


def _share(process: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0  # it has ended


def _gpu_used() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        done = subprocess.run(_GPU, capture_output=True, text=True, timeout=5, check=False)
        return int(done.stdout.split()[0]) << 20
    return 0
