"""The data of a drill's worker: files that child processes read a batch ahead, as those of the benchmark do.

The processes, and what the training publishes while it waits for them, are those of a real run. Only the files are
small, and nothing in them is decoded.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from lockstep.protocol.core.activity import InputWait
from lockstep.protocol.core.faults import SlowReads
from lockstep.protocol.core.ids import Step
from lockstep.protocol.core.timing import REJOIN_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.monitor.oom import OomWitness, find_counters
from lockstep.runtime.reading_process import (
    CLOSE_SECONDS,
    InputLost,
    ReadingProcess,
    parent_to_die_with,
    wait_for_lines,
)

RECORDS = 6
"""Of one batch."""
_BATCHES_AHEAD = 2
_LOOK_SECONDS = 0.5
_RECORD_BYTES = 256
_READER = (
    "from lockstep.runtime.processes import die_with_parent; int(sys.argv[2]) and die_with_parent(int(sys.argv[2]));"
    "from lockstep.drill.reading import read_until_the_end; read_until_the_end()"
)


class DrillInput:
    """The batches of one worker; without ``readers``, it needs no data."""

    def __init__(
        self, folder: Path, readers: int, slow: SlowReads | None, on_wait: Callable[[InputWait], None]
    ) -> None:
        self._folder = folder
        self._slow = slow
        self._on_wait = on_wait
        self._witness = OomWitness(find_counters(), time.monotonic())
        self._ahead: deque[dict[str, Path]] = deque()
        """For each batch, the files of it that are not read yet."""
        self._submitted: Step = 0
        self._read = 0
        self._handed_out_at = time.monotonic()
        command = processes.python_without_site(_READER, str(parent_to_die_with()))
        self._readers = [ReadingProcess(command, self._witness) for _ in range(readers)]
        if readers:
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(RECORDS):
                self._file(number).write_bytes(os.urandom(_RECORD_BYTES))

    def _file(self, number: int) -> Path:
        return self._folder / f"record-{number}"

    def next(self) -> None:
        """Wait for the batch of the next step; InputLost if a process that reads has ended."""
        if not self._readers:
            return
        while len(self._ahead) < _BATCHES_AHEAD:
            self._submit()
        self._collect()
        self._wait(self._ahead[0])
        self._ahead.popleft()
        self._handed_out_at = time.monotonic()

    def _submit(self) -> None:
        step, slow = self._submitted, self._slow
        self._submitted += 1
        is_slow = slow is not None and slow.step < step <= slow.step + slow.steps
        seconds = slow.seconds if slow is not None and is_slow else 0.0
        batch = {f"{step}.{number}": self._file(number) for number in range(RECORDS)}
        self._ahead.append(batch)
        for number, (ticket, file) in enumerate(batch.items()):
            self._readers[number % len(self._readers)].send(f"{ticket} {seconds} {file}\n".encode())

    def _collect(self) -> None:
        for reader in self._readers:
            reader.flush()
            for ticket in reader.lines():
                for batch in self._ahead:
                    self._read += batch.pop(ticket.decode(), None) is not None

    def _wait(self, batch: dict[str, Path]) -> None:
        since = read_at = time.monotonic()
        before = seen = self._read
        while batch:
            if self._read != seen:
                seen, read_at = self._read, time.monotonic()
            pids = tuple(reader.pid for reader in self._readers)
            file = str(next(iter(batch.values())))
            self._on_wait(InputWait(file, since, seen - before, read_at, self._handed_out_at, pids))
            self._witness.sample(time.monotonic())
            if wait_for_lines(self._readers, _LOOK_SECONDS):
                self._collect()
            elif time.monotonic() - read_at > REJOIN_SECONDS:
                raise InputLost(f"no record has arrived for {REJOIN_SECONDS:g} s: reading {file} hangs")

    def close(self) -> None:
        """End the processes."""
        for reader in self._readers:
            reader.end_input()
        deadline = time.monotonic() + CLOSE_SECONDS
        for reader in self._readers:
            reader.reap(deadline)
        self._readers = []


def read_until_the_end() -> None:
    """A process that reads: for each line on standard input, one file, and one line when it is read."""
    while line := sys.stdin.buffer.readline():
        ticket, seconds, file = line.rstrip(b"\n").split(b" ", 2)
        time.sleep(float(seconds))
        Path(os.fsdecode(file)).read_bytes()
        sys.stdout.buffer.write(ticket + b"\n")
        sys.stdout.buffer.flush()
