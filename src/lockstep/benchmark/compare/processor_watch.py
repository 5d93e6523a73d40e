"""Processor seconds of all programs that this process has started, over the time of a run.

The programs of a comparison are different systems, and some are not ours: none of them is asked. What they have used is
read from outside a few times a second, and a window in the past is cut out of that.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self

import psutil

PAUSE_SECONDS: Final = 0.2

Reading = tuple[float, float]
"""When (monotonic), and how many processor seconds had been used by then."""


def used_between(readings: Sequence[Reading], begin: float, end: float) -> float:
    """Processor seconds within a window; between two readings they count as spent evenly."""
    return _used_at(readings, end) - _used_at(readings, begin)


def _used_at(readings: Sequence[Reading], moment: float) -> float:
    after = bisect_right(readings, moment, key=lambda reading: reading[0])
    if after == 0 or after == len(readings):
        return readings[min(after, len(readings) - 1)][1]
    (t0, used0), (t1, used1) = readings[after - 1], readings[after]
    return used0 + (used1 - used0) * (moment - t0) / (t1 - t0)


def descendants(of: int, parents: Iterable[tuple[int, int]]) -> set[int]:
    """All processes below one, from pairs of a process and its parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents:
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(children.get(of, ()))
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


class ProcessorWatch:
    """Reads until the end of its block. A process that has ended keeps counting with what it had used last."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._readings: list[Reading] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="compare-processor-watch", daemon=True)

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def used(self, begin: float, end: float) -> float:
        """Processor seconds between two moments (monotonic) that are over."""
        return used_between(list(self._readings), begin, end)

    def _watch(self) -> None:
        while not self._over.wait(PAUSE_SECONDS):
            self._read()

    def _read(self) -> None:
        seen = {
            process.pid: process.info
            for process in psutil.process_iter(["ppid", "cpu_times"])
            if process.info["cpu_times"] is not None
        }
        for pid in descendants(os.getpid(), ((pid, info["ppid"]) for pid, info in seen.items())):
            times = seen[pid]["cpu_times"]
            self._last[pid] = times.user + times.system
        self._readings.append((time.monotonic(), sum(self._last.values())))
