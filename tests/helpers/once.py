"""What several tests compare with, made once for all processes of a run of pytest."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` has made, which only the first process calls; the others wait for it. If it fails, the next one
    tries."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each has a folder of its own in there
    kept = folder / f"once-{name}"
    with (folder / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = make()
            beside = kept.with_suffix(".part")
            beside.write_bytes(made)
            beside.rename(kept)
        return kept.read_bytes()


def lines_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], list[str]]) -> list[str]:
    """The same for lines."""
    return made_once(factory, name, lambda: "\n".join(make()).encode()).decode().split("\n")
