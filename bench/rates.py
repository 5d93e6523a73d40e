"""Runs ``lockstep bench`` and reads its last line; the other scripts here share this."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_TOTAL = re.compile(r"^total images/sec: ([0-9.]+)$", re.MULTILINE)
RUN_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table: a model, its batch per worker, and how many steps are enough for a steady rate."""

    model: str
    batch: int
    steps: int

    def flags(self) -> list[str]:
        return [
            "--device=cpu",
            f"--model={self.model}",
            f"--batch_size={self.batch}",
            f"--num_batches={self.steps}",
            "--num_warmup_batches=3",
            "--num_threads=1",
        ]


def start(*flags: str) -> subprocess.Popen[str]:
    """``lockstep bench FLAGS``, running."""
    command = [sys.executable, "-m", "lockstep", "bench", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rate(process: subprocess.Popen[str]) -> float:
    """Images per second of a run; ends this program if the run failed."""
    output, errors = process.communicate(timeout=RUN_SECONDS)
    found = _TOTAL.search(output)
    if process.returncode or found is None:
        sys.exit(f"a run failed with exit code {process.returncode}:\n{errors}")
    return float(found[1])


def cluster_rate(case: Case, *more: str) -> float:
    """One server and two workers."""
    return rate(start("--ps=1", "--workers=2", *case.flags(), *more))


def limit_rate(case: Case) -> float:
    """Two workers that do not communicate, each with its own optimizer, at the same time."""
    both = [start(*case.flags()) for _ in range(2)]
    return sum(rate(process) for process in both)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (lowest to highest)``."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
