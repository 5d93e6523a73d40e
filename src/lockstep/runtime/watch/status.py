"""What a task knows of itself: what its training thread is doing, and what moved recently.

The training loop sets ``MainThread``, which costs one assignment. ``Sampler`` looks from outside, twice a second, at
what the kernel and the links count: a thread that is marked "computing" and uses no CPU does not compute.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from lockstep.protocol.core.activity import TRAINING, Doing, InputWait, Learning
from lockstep.protocol.core.ids import Role, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.timing import CPU_WINDOW_SECONDS, KERNEL_LOOKS, KERNEL_SECONDS, STACK_AFTER_SECONDS
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.trace.step_tally import StepTally
from lockstep.runtime.watch.kernel_tcp import Counted, count_by_host
from lockstep.runtime.watch.stacks import Dwelling

STEPS_KEPT = 64
KERNEL_PAUSES = 200
"""Looking at the kernel's connections takes at most a two-hundredth of the time."""
STEPS_TO_KNOW = 3
"""This many steps must be done before it is known how long one takes."""
SAMPLES_KEPT = 12
SAMPLE_SECONDS = 2 * CPU_WINDOW_SECONDS / SAMPLES_KEPT
"""Samples are at least this far apart: those kept span the window, however often a watchdog ticks."""


class MainThread:
    """What the training thread of a task reports that it is doing. Any thread may read it."""

    def __init__(self) -> None:
        self._now: tuple[Doing, str, float] = (Doing.STARTING, "", time.monotonic())
        self.ident = 0
        self.native_id = 0
        self.input: InputWait | None = None
        """What it waits for, while it waits for data."""
        self.examples = 0
        """How many examples it has taken so far, where the program takes them from us."""
        self.learning = Learning()
        self.on_device = False
        """A drill claims that there is a device; a real one is found by what the process has opened."""

    def enter(self, doing: Doing, detail: str = "") -> None:
        """This thread is now doing this."""
        ident = threading.get_ident()
        if ident != self.ident:
            self.ident, self.native_id = ident, threading.get_native_id()
        self._now = (doing, detail, time.monotonic())

    def took(self, examples: int) -> None:
        """It has taken so many examples for its next step."""
        self.examples += examples

    def wait_for_input(self, wait: InputWait) -> None:
        """It waits for data, since then: the clock does not restart with each file."""
        self.enter(Doing.INPUT, wait.file)
        self.input = wait
        self._now = (Doing.INPUT, wait.file, wait.since)

    @contextmanager
    def during(self, doing: Doing, detail: str = "") -> Iterator[None]:
        """The same for a block; afterwards the former activity is restored."""
        before = self._now
        self.enter(doing, detail)
        try:
            yield
        finally:
            self._now = (before[0], before[1], time.monotonic())

    @property
    def doing(self) -> Doing:
        return self._now[0]

    def now(self) -> tuple[Doing, str, float]:
        """What it is doing, a detail (a file, a version), and since when."""
        return self._now


def thread_cpu(native_id: int) -> float:
    """Seconds for which one thread of this process had work, on a processor or in the queue for one; -1: not known.

    The time in the queue counts, because on a busy machine a thread that computes gets only a share of a processor.
    """
    try:
        # By hand, because it is read in every look: a file object takes four times as long.
        descriptor = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
        try:
            ran, queued, _ = os.read(descriptor, 200).split()
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return -1.0
    return (int(ran) + int(queued)) / 1e9


def bytes_written() -> int:
    """Bytes that this process has written to disks so far; -1 where the kernel does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), -1)


class Sampled(Protocol):
    """What a sampler looks at."""

    task: TaskId
    journal: Journal
    main: MainThread
    peers: dict[TaskId, PeerKeeper]

    @property
    def store_native_id(self) -> int: ...


@dataclass(slots=True)
class _Sample:
    at: float
    main: float
    store: float
    moved: dict[TaskId, int] = field(default_factory=dict)


class Sampler:
    """Keeps a few seconds of counters, and the durations of the last steps."""

    def __init__(self, node: Sampled, now: float) -> None:
        self._node = node
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_KEPT)
        self._kernel: deque[tuple[float, dict[str, Counted]]] = deque(maxlen=KERNEL_LOOKS)
        self._kernel_at = 0.0
        self._seen = 0
        self._written = -1
        self._written_at = now
        self._step_ends: deque[tuple[Step, float]] = deque(maxlen=STEPS_KEPT)
        self.progress_at = now
        self.progress = "started"
        self.dwelling = Dwelling()
        self.tally: StepTally | None = None
        """Sums over all steps, once somebody has asked for metrics."""

    def sample(self, now: float) -> None:
        """Read the counters once. Call it about twice a second."""
        node = self._node
        if not self._samples or now - self._samples[-1].at >= SAMPLE_SECONDS:
            main, store = thread_cpu(node.main.native_id), thread_cpu(node.store_native_id)
            moved = {peer: keeper.bytes_moved() for peer, keeper in node.peers.items() if keeper.linked}
            self._samples.append(_Sample(now, main, store, moved))
        self._read_journal()
        doing, _, since = node.main.now()
        if doing in TRAINING and now - since >= STACK_AFTER_SECONDS:  # never in a step that is as short as most
            self.dwelling.look(node.main.ident, since, now)
        if node.main.doing is Doing.CHECKPOINT:
            written = bytes_written()
            if written != self._written:
                self._written, self._written_at = written, now
        else:
            self._written_at = now

    def _read_journal(self) -> None:
        marker = Happening.SEALED if self._node.task.role is Role.WORKER else Happening.COMMITTED
        fresh, self._seen = self._node.journal.since(self._seen)
        for row in [row for row in fresh if row[1] is marker and row[4] is None]:
            if not self._step_ends or row[2] > self._step_ends[-1][0]:
                self._step_ends.append((row[2], row[0]))
        if self.tally is not None:
            self.tally.read(fresh, self.median())
        newest = self._node.journal.newest_progress(fresh)
        if newest is not None:
            self.progress_at, self.progress = newest.at, f"{newest.happening.value}, step {newest.step}"

    def _window(self) -> tuple[_Sample, _Sample] | None:
        if len(self._samples) < 2:
            return None
        last = self._samples[-1]
        first = next((s for s in self._samples if last.at - s.at <= CPU_WINDOW_SECONDS + 0.6), last)
        return (first, last) if last.at - first.at >= 0.75 * CPU_WINDOW_SECONDS else None

    def main_cpu(self) -> float:
        """Share of a CPU that the training thread used in the last two seconds; -1: not known."""
        window = self._window()
        if window is None or window[0].main < 0 or window[1].main < 0:
            return -1.0
        return max(0.0, window[1].main - window[0].main) / (window[1].at - window[0].at)

    def store_cpu(self) -> float:
        """The same for the thread that updates a server's shard."""
        window = self._window()
        if window is None or window[0].store < 0 or window[1].store < 0:
            return -1.0
        return max(0.0, window[1].store - window[0].store) / (window[1].at - window[0].at)

    def moved(self, peer: TaskId) -> int:
        """Bytes that went over the link with ``peer`` in the last two seconds, in either direction."""
        window = self._window()
        if window is None or peer not in window[0].moved or peer not in window[1].moved:
            return 0
        return max(0, window[1].moved[peer] - window[0].moved[peer])

    def sample_kernel(self, now: float) -> None:
        """Ask the kernel about this process's connections; only while something is stuck.

        It tells of every connection of the machine. Where there are thousands, that takes long, and it is asked seldom.
        """
        if now < self._kernel_at:
            return
        began = time.perf_counter()
        self._kernel.append((now, count_by_host()))
        self._kernel_at = now + max(KERNEL_SECONDS, KERNEL_PAUSES * (time.perf_counter() - began))

    def forget_kernel(self) -> None:
        """Steps go on: the earlier counts are obsolete."""
        self._kernel.clear()
        self._kernel_at = 0.0

    def kernel_facts(self, host: str) -> dict[str, float]:
        """What moved on the connections with ``host`` since the look before, and for how long that was watched."""
        if not self._kernel:
            return {"watched": 0.0}
        (began, first), (ended, last) = self._kernel[0], self._kernel[-1]
        before, now = first.get(host, Counted()), last.get(host, Counted())
        return {
            "watched": ended - began,
            "waiting": now.waiting,
            "segments_in": max(0, now.segments_in - before.segments_in),
            "quiet": longest_quiet([(at, counted.get(host, Counted()).segments_in) for at, counted in self._kernel]),
            "acknowledged": max(0, now.acknowledged - before.acknowledged),
            "retransmits": now.retransmits,
            "resent": max(0, now.retransmits - before.retransmits),
            "stuck": now.stuck,
            "path_mtu": now.path_mtu,
        }

    def written_ago(self, now: float) -> float:
        """Seconds since this process last wrote a byte, while it writes a checkpoint."""
        return now - self._written_at

    def step_seconds(self) -> list[float]:
        """Durations of the last steps, the oldest first."""
        ends = list(self._step_ends)
        return [later[1] - earlier[1] for earlier, later in pairwise(ends) if later[0] == earlier[0] + 1]

    def median(self) -> float:
        """Of these durations; 0 before there are any."""
        steps = sorted(self.step_seconds())
        return steps[len(steps) // 2] if steps else 0.0

    def last_step_at(self) -> float:
        """When a step last ended here; 0 before the first."""
        return self._step_ends[-1][1] if self._step_ends else 0.0

    def steps_done(self) -> int:
        return self._step_ends[-1][0] + 1 if self._step_ends else 0

    def usual(self, floor: float, first: float) -> float:
        """How long a wait may take before it is longer than usual: from the slower ones of the last steps."""
        steps = sorted(self.step_seconds())
        if len(steps) < STEPS_TO_KNOW:
            return first
        return max(floor, 1.5 * steps[int(0.9 * (len(steps) - 1))] + 0.5)


def longest_quiet(looks: Sequence[tuple[float, int]]) -> float:
    """The longest time in which no segment came, of looks at the clock and at the number of segments so far."""
    (since, count), longest = looks[0], 0.0
    for at, segments in looks:
        longest = max(longest, at - since)
        if segments != count:
            since, count = at, segments
    return longest
