"""What was measured, as plain numbers."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

import psutil

SIZES: Final = tuple(4096 << (2 * step) for step in range(9))
"""4 KiB to 256 MiB."""


@dataclass(slots=True)
class Measured:
    """One contender at one size. Latency: from the call until the peer answers that all bytes are in place."""

    contender: str
    nbytes: int
    rates: list[float] = field(default_factory=list)
    """Bytes per second of each round, with several transfers in flight."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each transfer that was alone on its link."""
    cpu_seconds: float = 0.0
    moved: int = 0

    @property
    def bytes_per_second(self) -> float:
        """The best round: what the path can do when nothing disturbs it."""
        return max(self.rates, default=0.0)

    def latency(self, share: float) -> float:
        """The latency that ``share`` of the transfers do not exceed; 0 without any."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    @property
    def cpu_per_gigabyte(self) -> float:
        """CPU seconds of both ends per 10^9 bytes."""
        return self.cpu_seconds / (self.moved / 1e9) if self.moved else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "contender": self.contender,
            "bytes": self.nbytes,
            "gigabytes_per_second": self.bytes_per_second / 1e9,
            "p50_microseconds": self.latency(0.50) * 1e6,
            "p99_microseconds": self.latency(0.99) * 1e6,
            "cpu_seconds_per_gigabyte": self.cpu_per_gigabyte,
            "transfers": len(self.latencies),
        }


@dataclass(frozen=True, slots=True)
class Ratio:
    """A path relative to its limit, at one size: the median of all rounds, the lowest and the highest."""

    path: str
    limit: str
    nbytes: int
    value: float
    low: float
    high: float


@dataclass(slots=True)
class MeasurementReport:
    """One run."""

    here: str
    there: str
    rows: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run here, and why."""

    def find(self, contender: str, nbytes: int) -> Measured | None:
        return next((row for row in self.rows if (row.contender, row.nbytes) == (contender, nbytes)), None)

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(row.contender for row in self.rows))

    def sizes(self) -> list[int]:
        return sorted({row.nbytes for row in self.rows})

    def ratios(self, pairs: Sequence[tuple[str, str]]) -> list[Ratio]:
        """Each path relative to its limit, at the largest size at which both were measured.

        The median of all rounds: within a round the two run back to back, and see the same machine.
        """
        found = []
        for path, limit in pairs:
            for nbytes in reversed(self.sizes()):
                mine, best = self.find(path, nbytes), self.find(limit, nbytes)
                if mine is not None and best is not None and mine.rates and best.rates:
                    rounds = [one / other for one, other in zip(mine.rates, best.rates, strict=True)]
                    found.append(Ratio(path, limit, nbytes, median(rounds), min(rounds), max(rounds)))
                    break
        return found

    def to_json(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        return {
            "here": self.here,
            "there": self.there,
            "rows": [row.to_json() for row in self.rows],
            "ratios": [asdict(ratio) for ratio in self.ratios(pairs)],
            "left_out": self.left_out,
        }


def describe_machine() -> str:
    """One line: name, cores, memory, load."""
    gigabytes = psutil.virtual_memory().total / 1e9
    load = psutil.getloadavg()[0]
    return f"{platform.node()}, {psutil.cpu_count()} cores, {gigabytes:.0f} GB, load {load:.1f}"
