"""The cause behind the sentence with which a job ended.

The machines end a job with one plain sentence. Here it is matched with a cause by the words that each of them uses;
a test makes the real machines and keepers say each of these sentences.
"""

from __future__ import annotations

from lockstep.diagnose.verdict import Cause

_WORDS: tuple[tuple[str, Cause], ...] = (
    ("for lack of memory", Cause.OUT_OF_MEMORY),
    ("MemoryError", Cause.OUT_OF_MEMORY),
    ("out of memory", Cause.OUT_OF_MEMORY),
    ("No space left on device", Cause.DISK_FULL),
    ("Disk quota exceeded", Cause.DISK_FULL),
    ("was started again", Cause.STALE_INCARNATION),
    ("was killed by", Cause.DEAD),
    ("ended with exit code", Cause.DEAD),
    ("is gone:", Cause.DEAD),
    ("received SIGTERM and left", Cause.DEAD),
    ("left before the job ended", Cause.DEAD),
    ("differs from the chief's", Cause.MISMATCH),
    ("start all tasks with the same value", Cause.MISMATCH),
    ("another job token", Cause.MISMATCH),
    ("install the same version", Cause.MISMATCH),
    ("the host lists or the task indices do not fit", Cause.WIRING),
    ("is already taken by process", Cause.DUPLICATE_TASK),
    ("is taken by another process", Cause.DUPLICATE_TASK),
    ("the job runs already with another life", Cause.LEFTOVER_SERVER),
    ("give every worker the same number of steps", Cause.OUT_OF_STEP),
    ("the cluster was not complete", Cause.NEVER_STARTED),
    ("could not be reached within", Cause.NEVER_STARTED),
    ("did not answer a request to join", Cause.COMMUNICATION),
)

ENDED_BY = ("verdict", "stall")
"""A watchdog that ends a job begins its sentence with one of these and the cause."""


def cause_of(reason: str) -> Cause:
    """The cause that a sentence names; a task's own error where none fits."""
    kind, _, rest = reason.partition(": ")
    if kind in ENDED_BY:
        named = rest.partition(": ")[0]
        return Cause(named) if named in set(Cause) else Cause.UNKNOWN
    return next((cause for words, cause in _WORDS if words in reason), Cause.FAILED)


def by_verdict(reason: str) -> bool:
    """Whether this end was found out about a task, rather than said by the task that failed (exit code 3 or 1)."""
    return reason.startswith(tuple(f"{kind}: " for kind in ENDED_BY)) or cause_of(reason) is not Cause.FAILED
