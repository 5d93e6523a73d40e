"""What drills use in place of user code or a device call that does not return.

They have their own file because a report tells whose code a thread is in by the file.
"""

from __future__ import annotations

import os
import tempfile
import time
from types import FunctionType

_PAGE = 4096
_BETWEEN_PAGES = 0.1


def user_code_that_waits(seconds: float) -> None:
    """Stands for a line of your script that does not return."""
    time.sleep(seconds)


def synchronize(seconds: float) -> None:
    """Stands for a device call that does not return; named like the real one, because stacks are read by name."""
    time.sleep(seconds)


def user_code_that_loops(seconds: float) -> None:
    """Stands for a loop of your script that does not end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(2000))


def user_code_that_writes(seconds: float, folder: str) -> None:
    """Stands for a large file on a slow disk: a page at a time, each on the disk before the next."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(bytes(_PAGE))
            os.fsync(file)
            time.sleep(_BETWEEN_PAGES)


def compiler_that_takes_long(seconds: float) -> None:
    """Stands for a compiler; its code is of a file named like the real one, because stacks are read by name."""
    code = user_code_that_waits.__code__.replace(co_filename="torch/_inductor/compile_fx.py", co_name="compile_fx")
    FunctionType(code, globals())(seconds)
