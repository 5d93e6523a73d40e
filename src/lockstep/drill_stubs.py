"""What drills use in place of user code or a device call that does not return.

They have their own file because a report tells whose code a thread is in by the file.
"""

from __future__ import annotations

import time


def user_code_that_waits(seconds: float) -> None:
    """Stands for a line of your script that does not return."""
    time.sleep(seconds)


def synchronize(seconds: float) -> None:
    """Stands for a device call that does not return; named like the real one, because stacks are read by name."""
    time.sleep(seconds)
