"""Who waits for whom, for what, and since when. The log line, the watchdog and ``lockstep why`` all read this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.keys import TensorKey

NO_BUCKET: BucketId = -1


class WaitKind(StrEnum):
    """What is waited for."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"
    SUM = "allreduce"
    """A bucket's sum over all workers, without servers."""
    OWN_STEP = "own step"
    """The computation of a process that trains alone."""
    CONNECTION = "connection"
    JOINING = "joining"
    """A task that has not joined yet."""
    COMPLETE = "complete"
    """The whole cluster, for a task that has joined."""
    COMMIT = "commit"
    APPLIED = "applied"
    """A server's message that a step is applied."""
    STATE = "state"
    """What a worker takes into the next step."""
    SHARD = "shard"
    """A server's part of a checkpoint."""
    RETURN = "return"
    """A worker that was lost."""
    NORM = "norm"
    """The norm of a step's mean gradient, or a part of it."""
    ANSWER = "answer"
    """The answer to a question outside of the steps."""
    CALL = "call"
    """A worker that has not come to a call that all workers make."""
    CALLER = "caller"
    """The same, as the coordinator has it, for which nobody waits there."""
    HOLDING = "holding"
    """The second home of a bucket, which has not made what was handed on to it."""
    END = "end"
    """The end of the job."""
    OTHER = "other"
    """A wait of a kind that this version does not know."""


TENSORS = frozenset({WaitKind.GRADIENT, WaitKind.PARAMETER, WaitKind.SUM})
UNLINKED = frozenset({WaitKind.SUM, WaitKind.CALL})
"""What workers wait for from workers, between which there may be no link of ours."""
FORMING = frozenset({WaitKind.JOINING, WaitKind.CONNECTION, WaitKind.COMPLETE})
"""What is waited for while a cluster forms."""


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` needs something from ``on`` to continue with ``step``; ``state`` is what the waiter knows of it.

    ``key`` and ``bucket``: the tensor, where it is one. ``detail`` names what is asked for in words, where the kind
    alone does not.
    """

    waiter: TaskId
    on: TaskId
    kind: WaitKind
    step: Step
    since: float
    deadline: float
    state: str
    key: TensorKey | None = None
    bucket: BucketId = NO_BUCKET
    detail: str = ""
