"""Processes that read a worker's data, as its training sees them: lines go in, lines come out, and none outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

from lockstep.runtime.monitor.exit import describe_death
from lockstep.runtime.monitor.oom import OomWitness

_PIPE_BYTES = 1 << 20
CLOSE_SECONDS = 2.0
"""How long all processes together may take to end when their input does."""
_KILL_SECONDS = 1.0
_READ_BYTES = 1 << 16


class InputLost(RuntimeError):  # noqa: N818 - reads as the fact it states
    """A process that reads data has ended, or has sent nothing for too long."""


def parent_to_die_with() -> int:
    """What a reading process gives to ``die_with_parent``; 0: nothing.

    The kernel's parent-death signal is tied to the thread that started the child; the end of the pipe is not, and works
    in every case except a child that hangs in a read.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


class ReadingProcess:
    """One process. Neither writing to it nor reading from it blocks."""

    def __init__(self, command: Sequence[str], witness: OomWitness, inherits: tuple[int, ...] = ()) -> None:
        """``inherits``: descriptors that it has under the same number. ``witness`` shows whether the kernel killed it
        for lack of memory."""
        self._witness = witness
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=inherits, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input = self._process.stdin.fileno()
        self.out = self._process.stdout.fileno()
        for end in (self.input, self.out):
            os.set_blocking(end, False)
            with contextlib.suppress(OSError):  # a limit of this system; the pipe is then smaller
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._unsent = bytearray()
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Send a line, now or as soon as there is room in the pipe."""
        self._unsent += line
        self.flush()

    def flush(self) -> None:
        """Write pending lines as far as there is room."""
        while self._unsent:
            try:
                written = os.write(self.input, self._unsent)
            except BlockingIOError:
                return
            except BrokenPipeError:
                raise InputLost(self._death()) from None
            del self._unsent[:written]

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def lines(self) -> Iterator[bytes]:
        """The complete lines received so far; InputLost if the process has ended."""
        while True:
            try:
                data = os.read(self.out, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise InputLost(self._death())
            *whole, self._unread = (self._unread + data).split(b"\n")
            yield from whole

    def _death(self) -> str:
        try:
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"input process {self.pid} closed its pipe"
        if code < 0:
            return f"data can no longer be read: {describe_death('input process', self.pid, -code, self._witness)}"
        return f"input process {self.pid} ended with code {code}; data can no longer be read"

    def end_input(self) -> None:
        """Let the process end after its current work."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def reap(self, deadline: float) -> None:
        """Wait for the process to end, and kill it if it does not by ``deadline``, on the monotonic clock."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel, on a disk or a mount
                self._process.wait(_KILL_SECONDS)


def wait_for_lines(children: list[ReadingProcess], seconds: float) -> list[ReadingProcess]:
    """Block until a child has sent something; meanwhile, flush pending lines to children that have room."""
    poller = select.poll()
    by_descriptor = {}
    for child in children:
        poller.register(child.out, select.POLLIN)
        by_descriptor[child.out] = child
        if child.has_unsent:
            poller.register(child.input, select.POLLOUT)
    events = poller.poll(max(0.0, seconds) * 1000)
    for child in children:
        child.flush()
    return [by_descriptor[descriptor] for descriptor, _ in events if descriptor in by_descriptor]
