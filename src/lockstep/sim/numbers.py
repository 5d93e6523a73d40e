"""Numbers instead of tensors, for runs in which steps are computed again after a loss.

Every gradient and every version is a number that depends on everything that ever went into it, in order: parameters,
optimizer state, rates, a worker's local state. So a gradient that is lost, doubled, stale, or computed from anything
that the undisturbed run did not have, gives other numbers.
"""

from __future__ import annotations

import zlib

from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.sim.violation import Rule, Violation


def mixed(*values: object) -> int:
    """A number that depends on all of these, the same in every run."""
    return zlib.crc32(repr(values).encode())


class Numbers:
    """What each gradient and version was when first made; it must be the same each time it is made again."""

    def __init__(self) -> None:
        self._gradients: dict[tuple[TaskId, Step, BucketId], int] = {}
        self._versions: dict[tuple[BucketId, int], int] = {}

    def gradient_made(self, worker: TaskId, step: Step, bucket: BucketId, number: int) -> int:
        if self._gradients.setdefault((worker, step, bucket), number) != number:
            raise Violation(
                Rule.NOT_REPEATED, f"{worker} computed step {step} again, and its gradient of bucket {bucket} differs"
            )
        return number

    def version_made(self, bucket: BucketId, version: int, number: int) -> int:
        if self._versions.setdefault((bucket, version), number) != number:
            raise Violation(Rule.NOT_REPEATED, f"version {version} of bucket {bucket} was made again, and differs")
        return number

    def gradient(self, worker: TaskId, step: Step, bucket: BucketId) -> int:
        """The number of this gradient; 0 if it was never made."""
        return self._gradients.get((worker, step, bucket), 0)
