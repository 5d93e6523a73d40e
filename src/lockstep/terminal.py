"""Lines for people, on stderr and on terminals."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from lockstep.foreign import plain_lines

_LONGEST_LINE = 1 << 16
CLEAR_LINE = "\r\x1b[K"
"""Back to the first column, and empty the line."""


def clear_line(live: bool) -> str:
    """What must precede a line of text on a terminal that may show a live line."""
    return CLEAR_LINE if live else ""


def say(text: str) -> None:
    """Write one line to stderr in one piece, because a task and its monitor share it.

    A line that cannot be written is dropped: a full disk under a log must not end what the line is about.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, or never there (None)
        sys.stderr.write(f"lockstep: {shown(text)}\n")
        sys.stderr.flush()


def say_over(text: str) -> None:
    """As ``say``, in place of a live line or the ``^C`` that a terminal shows."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{clear_line(sys.stderr.isatty())}lockstep: {shown(text)}\n")
        sys.stderr.flush()


def shown(text: str) -> str:
    """The same lines without anything that a terminal would obey, whoever has put it into them."""
    return plain_lines(text.split("\n"), _LONGEST_LINE)


def drop_what_cannot_be_written() -> None:
    """From now on printing never fails in this process, for example on a full disk; lost output is noted once it works.

    For processes whose work is not their output: a task, its monitor, a cluster. Streams that somebody else has
    replaced stay as they are.
    """
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lenient(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lenient(sys.stderr, 2)


def _lenient(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # its descriptor was closed when Python started, and a file opened since may have its number
        return open(os.devnull, "w")
    with contextlib.suppress(OSError):
        stream.flush()
    sink = io.BufferedWriter(_LenientFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        sink, encoding=stream.encoding, errors=stream.errors, line_buffering=descriptor == 2 or stream.isatty()
    )


class _LenientFile(io.FileIO):
    """A descriptor whose output counts as written even if it could not be."""

    _lost = 0
    _why = ""

    def write(self, data: Any, /) -> int:
        nbytes = memoryview(data).nbytes
        try:
            if self._lost:
                super().write(f"lockstep: {self._lost} pieces of output were lost here: {self._why}\n".encode())
                self._lost = 0
            written: int | None = super().write(data)
        except OSError as error:
            self._lost, self._why = self._lost + 1, error.strerror or ""
            return nbytes
        return nbytes if written is None else written  # None: a non-blocking terminal that is full
