"""What drills put in the place of a user's program or a device that does not return.

They have a file of their own because a report judges by the file in which a thread stands whose code it is.
"""

from __future__ import annotations

import time


def user_code_that_waits(seconds: float) -> None:
    """Stands for a line of a user's program that does not return."""
    time.sleep(seconds)


def synchronize(seconds: float) -> None:
    """Stands for a device call that does not return; named like the real one, because stacks are read by name."""
    time.sleep(seconds)
