"""Bounds of the calls that all workers make (``job.all_reduce`` and the like): they travel in control messages."""

from __future__ import annotations

from typing import Final

OUTSIDE_LOOPS: Final = 1 << 53
"""In place of an iteration: before the first loop, or after the loop that was begun last. After every iteration."""
MOST_CALL_BYTES: Final = 1 << 20
"""What one worker may bring."""
MOST_ANSWER_BYTES: Final = 8 << 20
"""What all may bring together, since each receives it all; half of the largest control message."""
KEPT_CALL_BYTES: Final = 16 << 20
"""What the coordinator keeps of complete calls, for a worker that comes back and makes them again."""
MOST_NAMED: Final = 16
"""How many of the workers that have not come are named."""


def most_bytes(workers: int) -> int:
    """What each of so many workers may bring."""
    return min(MOST_CALL_BYTES, MOST_ANSWER_BYTES // max(1, workers))
