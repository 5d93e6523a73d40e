"""A terminal for programs under test, so that Ctrl-C works as it does for a person."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from types import TracebackType

from helpers.programs import Program
from helpers.waiting import wait_until

_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """Runs one program in the foreground of its own pseudo-terminal."""

    def __init__(self, command: Sequence[str]) -> None:
        self._master, slave = os.openpty()
        self._shown = b""
        try:
            self.program = Program([sys.executable, "-c", _TAKE_TERMINAL, *command], terminal=slave)
        finally:
            os.close(slave)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def shown(self) -> str:
        """What is on the screen so far."""
        while select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                break  # every program has closed its end
            if not data:
                break
            self._shown += data
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str, seconds: float) -> None:
        wait_until(lambda: text in self.shown(), seconds, f"{text!r} on the screen: {self.shown()}")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.program.close()
        os.close(self._master)
