"""The network adapter of a host: one queue out and one queue in, each with its own rate.

Bytes leave a host in the order in which they were sent and enter the other host in the order in which they arrive. The
switch between them is assumed to be wide enough. Two tasks on one host do not use the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.protocol.core.ids import ClusterShape, TaskId


@dataclass(slots=True)
class Queue:
    """One direction of an adapter."""

    free_at: float = 0.0
    busy: float = 0.0
    """Seconds spent moving bytes."""

    def take(self, now: float, seconds: float) -> float:
        """Queue this many seconds of work, and return when it starts."""
        begins = max(now, self.free_at)
        self.free_at = begins + seconds
        self.busy += seconds
        return begins


@dataclass(slots=True)
class Adapter:
    """Both directions of one host."""

    out: Queue
    into: Queue


def adapters(shape: ClusterShape, *, shared: bool) -> Mapping[TaskId, Adapter]:
    """One per task; ``shared``: server *i* is on the host of worker *i*, if there is one."""
    made = {task: Adapter(Queue(), Queue()) for task in shape.tasks()}
    if shared:
        for mine, other in zip(shape.server_ids(), shape.worker_ids(), strict=False):
            made[mine] = made[other]
    return made
