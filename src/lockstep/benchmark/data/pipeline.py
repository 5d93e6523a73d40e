"""Batches of decoded images, prepared ahead of the training by separate processes.

No thread is needed: jobs for the next batches are in the processes' pipes while the training computes, results wait in
the pipes back, and ``next`` collects them. While it waits, it publishes what it waits for.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.data.errors import BadData, TooManyBadRecords
from lockstep.benchmark.data.jobs import DecodeJob, DecodeResult, Sample, SetUp
from lockstep.benchmark.data.order import EpochSample, Order
from lockstep.benchmark.data.slots import Slots, SlotShape
from lockstep.benchmark.data.source import EncodedSource
from lockstep.benchmark.data.transforms import Preparation, make_engine
from lockstep.protocol.core.activity import InputWait
from lockstep.runtime.monitor.oom import OomWitness, find_counters
from lockstep.runtime.reading_process import (
    CLOSE_SECONDS,
    InputLost,
    ReadingProcess,
    parent_to_die_with,
    wait_for_lines,
)

_LOOK_SECONDS = 0.5
"""While waiting, how often to check which file the processes are reading."""

_ROOT = str(Path(__file__).resolve().parents[3])
_DECODER = (
    # The images are spread over processes already, so threads inside libraries would only get in the way.
    "import os, sys; os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1');"
    "sys.path.insert(0, sys.argv[1]);"
    "parent = int(sys.argv[2]);"
    "from lockstep.runtime.processes import die_with_parent; parent and die_with_parent(parent);"
    "from lockstep.benchmark.data.decoding import main; sys.exit(main())"
)

OnWait = Callable[[InputWait], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """How the input is read. ``on_wait`` is called again and again while the training waits."""

    processes: int = 1
    prefetch: int = 2
    max_bad_records: int = 10
    patience: float = 300.0
    on_wait: OnWait = lambda _wait: None
    on_bad: Say = lambda _sentence: None


@dataclass(slots=True)
class InputStatus:
    """What the input is doing, for readers in other threads; every field is replaced as a whole."""

    waiting_for: str = ""
    """A file, while the training waits for it."""
    waiting_since: float = 0.0
    """On the monotonic clock."""
    seconds_waited: float = 0.0
    bad: dict[str, str] = field(default_factory=dict)
    """Skipped records by location, each with the reason."""

    def wait_for(self, what: str) -> None:
        if not self.waiting_for:
            self.waiting_since = time.monotonic()
        self.waiting_for = what

    def came(self) -> None:
        if self.waiting_for:
            self.seconds_waited += time.monotonic() - self.waiting_since
        self.waiting_for = ""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One batch in host memory, valid until the next one: ``images`` (n, size, size, 3) and ``labels`` (n,)."""

    step: int
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


class Batches(Protocol):
    """A stream of batches."""

    status: InputStatus

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """All memory used for batches, if it is always the same."""

    def next(self) -> HostBatch:
        """The batch of the next step."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Ahead:
    """A batch in the making."""

    step: int
    slot: int
    count: int
    tickets: dict[int, DecodeJob] = field(default_factory=dict)


class DecodePipeline:
    """The batches of one worker from files of images."""

    def __init__(
        self, source: EncodedSource, order: Order, how: Preparation, options: InputOptions, first_step: int = 0
    ) -> None:
        make_engine(how.engine)  # report a missing library here, in one sentence, not from a process that dies
        self.status = InputStatus()
        self._source = source
        self._order = order
        self._options = options
        self._next_step = first_step
        self._ahead: deque[_Ahead] = deque()
        self._of_ticket: dict[int, _Ahead] = {}
        self._ticket = 0
        self._turn = 0
        shape = SlotShape(options.prefetch + 1, order.batch_size, how.size, options.processes)
        self._slots = Slots(shape)
        self._free = list(range(shape.slots))
        self._used: int | None = None
        self._children: list[ReadingProcess] = []
        self._handed_out_at = time.monotonic()
        self._read = 0
        """Records of all finished jobs."""
        self._witness = OomWitness(find_counters(), self._handed_out_at)
        try:
            for number in range(options.processes):
                command = [sys.executable, "-c", _DECODER, _ROOT, str(parent_to_die_with())]
                child = ReadingProcess(command, self._witness, (self._slots.descriptor,))
                self._children.append(child)
                child.send(SetUp(self._slots.descriptor, shape, number, source.classes, how).to_line())
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        return self._slots.memory

    @property
    def pids(self) -> list[int]:
        """The decoding processes."""
        return [child.pid for child in self._children]

    def next(self) -> HostBatch:
        """The batch of the next step, its memory valid until the call after this one."""
        if self._used is not None:
            self._free.append(self._used)
            self._used = None
        while self._free and len(self._ahead) < self._options.prefetch + 1:
            self._submit()
        self._collect()
        batch = self._ahead[0]
        if batch.tickets:
            self._wait(batch)
        self._ahead.popleft()
        self._handed_out_at = time.monotonic()
        self._used = batch.slot
        count = batch.count
        return HostBatch(batch.step, self._slots.images(batch.slot)[:count], self._slots.labels(batch.slot)[:count])

    # -- sending jobs --

    def _submit(self) -> None:
        places = self._order.places(self._next_step)
        batch = _Ahead(self._next_step, self._free.pop(), len(places))
        self._ahead.append(batch)
        self._next_step += 1
        chunk = max(1, min(16, -(-len(places) // (2 * len(self._children)))))
        for first in range(0, len(places), chunk):
            self._give(batch, first, tuple(self._sample(place) for place in places[first : first + chunk]))

    def _give(self, batch: _Ahead, first: int, samples: tuple[Sample, ...]) -> None:
        self._ticket += 1
        job = DecodeJob(self._ticket, batch.slot, first, samples)
        batch.tickets[self._ticket] = job
        self._of_ticket[self._ticket] = batch
        self._children[self._turn].send(job.to_line())
        self._turn = (self._turn + 1) % len(self._children)

    def _sample(self, place: EpochSample) -> Sample:
        """The sample at a place or, if it is known to be bad, the next good one of the set."""
        size = len(self._source)
        for further in range(size):
            index = (place.index + further) % size
            reference = self._source.reference(index)
            if str(reference) not in self.status.bad:
                return Sample(reference, index, place.epoch)
        raise BadData(f"all {size} records are bad; the last: {self._last_bad()}")

    # -- receiving results --

    def _wait(self, batch: _Ahead) -> None:
        already = self._records_read()
        seen, last_result = already, time.monotonic()
        while batch.tickets:
            if (read := self._records_read()) != seen:
                seen, last_result = read, time.monotonic()
            self._publish(batch, seen - already, last_result)
            self._witness.sample(time.monotonic())
            if wait_for_lines(self._children, _LOOK_SECONDS):
                self._collect()
            elif time.monotonic() - last_result > self._options.patience:
                raise InputLost(
                    f"no image has arrived for {self._options.patience:g} s: reading {self._file_of(batch)} hangs; "
                    "check the disk or the network mount that holds it."
                )
        self.status.came()

    def _publish(self, batch: _Ahead, read: int, read_at: float) -> None:
        file, status = self._file_of(batch), self.status
        status.wait_for(file)
        wait = InputWait(file, status.waiting_since, read, read_at, self._handed_out_at, tuple(self.pids))
        self._options.on_wait(wait)

    def _records_read(self) -> int:
        """Records of finished jobs, and those of running ones as far as the processes have got."""
        running = (int(said) for said in self._slots.progress if int(said) >> 16 in self._of_ticket)
        return self._read + sum(said & 0xFFFF for said in running)

    def _file_of(self, batch: _Ahead) -> str:
        """The file being read by a process that works on this batch."""
        for said in self._slots.progress.tolist():
            job = batch.tickets.get(said >> 16)
            if job is not None:
                return str(job.samples[said & 0xFFFF].reference)
        return str(next(iter(batch.tickets.values())).samples[0].reference)

    def _collect(self) -> None:
        for child in self._children:
            child.flush()
            for line in child.lines():
                self._take(DecodeResult.from_line(line))

    def _take(self, done: DecodeResult) -> None:
        batch = self._of_ticket.pop(done.ticket)
        job = batch.tickets.pop(done.ticket)
        self._read += len(job.samples)
        for place, reason in done.bad:
            self._skip(job.samples[place], reason)
        for place, _ in done.bad:
            sample = job.samples[place]
            self._give(batch, job.first + place, (self._sample(EpochSample(sample.index, sample.epoch)),))

    def _skip(self, sample: Sample, reason: str) -> None:
        name = str(sample.reference)
        if name in self.status.bad:
            return
        self.status.bad = {**self.status.bad, name: reason}
        count, most = len(self.status.bad), self._options.max_bad_records
        if count > most:
            raise TooManyBadRecords(
                f"{count} records are bad, but --max_bad_records allows only {most}; the last: {self._last_bad()}; "
                "'lockstep data check DIR' lists them all."
            )
        self._options.on_bad(f"skipped a bad record ({count} of {most} allowed): {self._last_bad()}")

    def _last_bad(self) -> str:
        name, reason = list(self.status.bad.items())[-1]
        return f"{name}: {reason}"

    def close(self) -> None:
        """End the processes and release the memory."""
        for child in self._children:
            child.end_input()
        deadline = time.monotonic() + CLOSE_SECONDS
        for child in self._children:
            child.reap(deadline)
        self._children = []
        self._slots.close()
