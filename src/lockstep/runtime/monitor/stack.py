"""The Python stack of a task, taken from outside, so that a task that cannot answer still shows where it is."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SECONDS: Final = 2.0
_KEEP_SECONDS: Final = 1.0
_MAX_TEXT: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Stack:
    """Either ``text``, or the reason why there is none."""

    text: str
    problem: str


def take_stack(pid: int, seconds: float = _SECONDS) -> Stack:
    """Run ``py-spy dump``; it reads the memory of the task without stopping it. Blocks up to ``seconds``."""
    program = find_py_spy()
    if program is None:
        return Stack("", "py-spy is not installed")
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Stack("", f"py-spy gave no stack within {seconds:g} s")
    except OSError as error:
        return Stack("", f"cannot start {program}: {error.strerror}")
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[:500]
        return Stack("", f"py-spy failed: {reason or f'exit code {done.returncode}'}")
    return Stack(done.stdout[:_MAX_TEXT], "")


def find_py_spy() -> str | None:
    """Where the program is; None if it is not installed."""
    beside_python = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside_python) if beside_python.exists() else shutil.which("py-spy")


class StackTaker:
    """Takes one stack at a time, however many callers ask; those that wait get the one being taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = Stack("", "none has been taken yet")
        self._taken_at = float("-inf")
        self._pid = 0

    def take(self, pid: int) -> Stack:
        """A stack that is at most a second old."""
        with self._lock:
            if pid != self._pid or time.monotonic() - self._taken_at > _KEEP_SECONDS:
                self._last = take_stack(pid)
                self._taken_at, self._pid = time.monotonic(), pid
            return self._last
