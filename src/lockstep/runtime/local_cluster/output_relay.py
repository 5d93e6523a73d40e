"""Passes on what the tasks of a local cluster print, prefixing each line with the name of its task.

Every task prints the same report; on one terminal it is shown once, and the others only refer to it.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import IO, Final

from lockstep.diagnose.text import RULE
from lockstep.private_files import open_to_append
from lockstep.runtime.processes import read_available
from lockstep.terminal import clear_line

_LONGEST_LINE: Final = 64 * 1024
"""Longer lines, or text without any end of line, are passed on in pieces."""

_TAIL: Final = 5


class Relay:
    """One pipe from one task. Its lines go to ``log``, and to stderr or, unless ``shown``, into a short tail."""

    def __init__(self, name: str, reader: int, shown: bool, log: IO[bytes] | None, reports: set[str]) -> None:
        """``reports``: those that any task of the cluster has shown so far."""
        self.reader = reader
        self._reports = reports
        self._report: list[str] = []
        """The lines of a report that has not ended yet."""
        self._prefix = f"[{name}] "
        self._shown = shown
        self._log = log
        self._pending = b""
        self._tail: deque[str] = deque(maxlen=_TAIL)
        os.set_blocking(reader, False)

    def pump(self) -> bool:
        """Pass on what has arrived; False at the end of the pipe."""
        data = read_available(self.reader)
        *lines, self._pending = (self._pending + (data or b"")).split(b"\n")
        if self._pending and (data is None or len(self._pending) > _LONGEST_LINE):
            lines.append(self._pending)
            self._pending = b""
        for line in lines:
            self._pass_on(line)
        if data is None:
            self._show_report()
        return data is not None

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        if self._log is not None:
            self._log.write(line + b"\n")
            self._log.flush()
        if not self._shown:
            self._tail.append(text)
        elif text == RULE or self._report:
            self._report.append(text)
            if text == RULE and len(self._report) > 1:
                self._show_report()
        else:
            self._show(text)

    def _show_report(self) -> None:
        lines, self._report = self._report, []
        report = "\n".join(lines)
        if not lines:
            return
        if report in self._reports:
            self._show("(the report above)")
            return
        self._reports.add(report)
        for line in lines:
            self._show(line)

    def _show(self, text: str) -> None:
        sys.stderr.write(f"{clear_line(sys.stderr.isatty())}{self._prefix}{text}\n")
        sys.stderr.flush()

    def be_quiet(self) -> None:
        """Show nothing more; the log still gets it."""
        self._show_report()
        self._shown = False

    def show_tail(self) -> None:
        """Show the last lines that were not shown, because they matter now."""
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
    return open_to_append(folder / f"{name.replace(' ', '-')}.log")
