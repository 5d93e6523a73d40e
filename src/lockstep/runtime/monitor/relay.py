"""Passes on what the tasks of a local cluster print, each line with the name of its task."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import IO, Final

from lockstep.runtime.processes import read_available

_LONGEST_LINE: Final = 64 * 1024
"""What is longer, or has no end of line at all, is passed on in pieces."""

_TAIL: Final = 5

_CLEAR_LINE: Final = "\r\x1b[K"
"""Takes away a live line that may stand there."""


class Relay:
    """One pipe from one task. Its lines go to ``log``, and to stderr or, where not ``shown``, into a short tail."""

    def __init__(self, name: str, reader: int, shown: bool, log: IO[bytes] | None) -> None:
        self.reader = reader
        self._prefix = f"[{name}] "
        self._shown = shown
        self._log = log
        self._pending = b""
        self._tail: deque[str] = deque(maxlen=_TAIL)
        os.set_blocking(reader, False)

    def pump(self) -> bool:
        """Pass on what has come; False at the end of the pipe."""
        data = read_available(self.reader)
        *lines, self._pending = (self._pending + (data or b"")).split(b"\n")
        if self._pending and (data is None or len(self._pending) > _LONGEST_LINE):
            lines.append(self._pending)
            self._pending = b""
        for line in lines:
            self._pass_on(line)
        return data is not None

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        if self._log is not None:
            self._log.write(line + b"\n")
            self._log.flush()
        if self._shown:
            clear = _CLEAR_LINE if sys.stderr.isatty() else ""
            sys.stderr.write(f"{clear}{self._prefix}{text}\n")
            sys.stderr.flush()
        else:
            self._tail.append(text)

    def show_tail(self) -> None:
        """Show the last lines of what was not shown, because it matters now."""
        for text in self._tail:
            sys.stderr.write(f"{self._prefix}{text}\n")
        sys.stderr.flush()
        self._tail.clear()

    def close(self) -> None:
        os.close(self.reader)


def open_log(folder: Path | None, name: str) -> IO[bytes] | None:
    """The file for what ``name`` prints, or None without a folder."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{name.replace(' ', '-')}.log").open("ab")
