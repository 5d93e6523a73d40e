"""Who waits for whom, for what, since when. The log line, the watchdog, ``why`` and the dashboard all read this."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.ids import BucketId, Step, TaskId
from lockstep.protocol.keys import TensorKey

STATE_WAIT = "its state before step"
"""What the coordinator waits for of a worker that has yet to say with what it goes into the next step."""


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` needs ``what`` of ``on`` to go on with ``step``; ``state`` is what the waiter knows of it."""

    waiter: TaskId
    on: TaskId
    what: str
    step: Step
    since: float
    deadline: float
    state: str

    def phrase(self, now: float) -> str:
        """One line a person can read."""
        return (
            f"{self.waiter} has waited {max(0.0, now - self.since):.1f} s for {self.on}: "
            f"{self.what}, step {self.step} ({self.state})"
        )

    def key(self) -> TensorKey | None:
        """The tensor that is waited for; None where it is no tensor (a commit, a join)."""
        try:
            return TensorKey.parse(self.what)
        except ValueError:
            return None


def bucket_of(key: TensorKey) -> BucketId | None:
    """The bucket that a key names: 3 for ``gradient/bucket_3``."""
    _, _, number = key.name.rpartition("bucket_")
    return int(number) if number.isdecimal() else None
