"""What a spare loads in tests: nothing, but only once a file is there. It stands beside ``small_task.py``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path


def wait_for_file(words: Sequence[str]) -> None:
    pause = threading.Event()
    while not Path(words[0]).exists():
        pause.wait(0.01)
