"""What the engines' tests train, and how results are told from each other."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import library.lasting_program
from helpers.programs import LOCKSTEP

PROGRAM = (sys.executable, str(library.lasting_program.__file__), "--servers=1")
"""A program of one's own, for one server and two workers."""
FLAGS = ("--device=cpu", "--model=lenet", "--batch_size=4", "--num_warmup_batches=0", "--num_threads=1")
BENCH = ("bench", *FLAGS, "--ps=1", "--workers=2")
RUN = (*LOCKSTEP, "run", "--")


def digests(text: str) -> set[str]:
    """Of the models that the program's two workers ended with."""
    found = re.findall(r"worker \d of 2: (\w{16}) at", text)
    assert len(found) == 2, text
    return set(found)


def bits(folder: Path) -> str:
    """Of the model that the benchmark has written there."""
    return hashlib.sha256((folder / "final.safetensors").read_bytes()).hexdigest()


def die_once(worker: int, step: int, mark: Path) -> tuple[str, str]:
    """Flags with which the program kills itself there, in its first life."""
    return f"--die={worker}:{step}:early", f"--once={mark}"
