"""Runs a real job under ``lockstep watch``, and waits for what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from helpers.ports import free_port
from lockstep.runtime.processes import descendants, send_signal

TRAIN = Path(__file__).with_name("train.py")
TORCHRUN = Path(sysconfig.get_path("scripts")) / "torchrun"
PATIENCE = 240.0
"""For a busy machine: a healthy one needs a tenth of it."""


def environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": source}


def torchrun(*arguments: str, ranks: int = 3, script: Path = TRAIN) -> list[str]:
    return [str(TORCHRUN), f"--master-port={free_port()}", f"--nproc-per-node={ranks}", str(script), *arguments]


class WatchedJob:
    """``lockstep watch`` above a command, in a ``with`` block that leaves nothing running."""

    def __init__(self, folder: Path, command: Sequence[str], *flags: str, pids: Sequence[int] = ()) -> None:
        """``pids``: of a job that runs already, instead of a command."""
        self.folder = folder / "run"
        self.output = folder / "output.txt"
        self.mark = folder / "mark"
        what = [*map(str, pids)] or ["--", *command]
        watch = [sys.executable, "-m", "lockstep", "watch", f"--folder={self.folder}", *flags, *what]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(watch, stdout=output, stderr=subprocess.STDOUT, env=environment())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        below = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        for facts in below:
            send_signal(facts.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: Callable[[], Any], *, even_after: bool = False) -> Any:
        """``even_after``: the job may end before it is there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll() is not None
            found = what()
            if found:
                return found
            assert time.monotonic() < deadline, f"it did not come in time:\n{self.text}"
            assert even_after or not ended, f"the job has ended first:\n{self.text}"
            assert not (even_after and ended), f"the job has ended without it:\n{self.text}"
            time.sleep(0.05)

    def first_event(self) -> dict[str, Any]:
        """The first notice or verdict after the fault has struck."""

        def after_the_fault() -> dict[str, Any] | None:
            struck = float(self.mark.read_text()) if self.mark.exists() else float("inf")
            return next((one for one in self.events() if one["time"] >= struck), None)

        found: dict[str, Any] = self.wait_for(after_the_fault, even_after=True)
        return found | {"after": found["time"] - float(self.mark.read_text())}
