"""After its timed steps a program waits until ``bench/own_program.py`` has looked at the memory of all processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

PAUSE: Final = "OWN_PROGRAM_PAUSE"
"""The variable with the folder through which they speak; a program that a person starts has none."""
TIMED, LOOKED = "timed-", "looked"
_PATIENCE_SECONDS = 30.0


def wait_until_looked_at(rank: int) -> None:
    folder = os.environ.get(PAUSE)
    if not folder:
        return
    Path(folder, f"{TIMED}{rank}").touch()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not Path(folder, LOOKED).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
