"""Forks without gRPC's log lines, in a program that imported gRPC before us: then it logs as it likes, for good.

It writes its line about a fork while the process forks, to the descriptor of stderr. So for that moment the descriptor
leads to memory; what others wrote meanwhile is written again, and gRPC's line is not.
"""

from __future__ import annotations

import contextlib
import os
import re

STDERR = 2
_LINE = re.compile(rb"[IWEF]\d{4} [^\n]*fork_posix\.cc:\d+\][^\n]*\n?")


class QuietForks:
    """Around every fork of this process, from ``install`` on."""

    def __init__(self) -> None:
        self._kept: int | None = None
        """What stderr was."""
        self._memory: int | None = None

    def install(self) -> None:
        os.register_at_fork(before=self.before, after_in_parent=self.after, after_in_child=self.after_in_child)

    def before(self) -> None:
        with contextlib.suppress(OSError):  # a program may have closed its stderr, or have no descriptor left
            memory = os.memfd_create("stderr")
            try:
                self._kept = os.dup(STDERR)
                os.dup2(memory, STDERR)
            except OSError:
                os.close(memory)
                raise
            self._memory = memory

    def after(self) -> None:
        memory = self._restore()
        if memory is None:
            return
        with contextlib.suppress(OSError), os.fdopen(memory, "rb") as written:
            written.seek(0)
            if others := _LINE.sub(b"", written.read()):
                os.write(STDERR, others)

    def after_in_child(self) -> None:
        memory = self._restore()
        if memory is not None:
            os.close(memory)  # the parent writes it

    def _restore(self) -> int | None:
        kept, memory = self._kept, self._memory
        self._kept = self._memory = None
        if kept is not None:
            os.dup2(kept, STDERR)
            os.close(kept)
        return memory
