"""Names of tasks and incarnations.

A *task* is one member of the cluster. Wherever a person reads its name, it is spelled as in the logs of the original
system, ``/job:worker/replica:0/task:1``. An *incarnation* is one start of a task, named
by 64 random bits; a *job id* is 64 random bits, one per run of the whole cluster. Both are drawn outside
this package (it has no randomness) and printed as 16 hexadecimal digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache

Incarnation = int
JobId = int
Step = int
BucketId = int

INITIAL_STEP: Step = -1
"""The step that turns nothing into version 0: the chief's initial parameters travel as its gradient."""
NOTHING_TO_APPLY: Step = 1 << 62
"""The step that a server without a bucket reports as applied, once and for all."""


class Role(StrEnum):
    """The two jobs of a cluster, spelled as in ``--job_name``."""

    SERVER = "ps"
    WORKER = "worker"


@dataclass(frozen=True, order=True, slots=True)
class TaskId:
    """One member of the cluster, in any incarnation."""

    role: Role
    index: int

    def __hash__(self) -> int:
        # Tasks are keys of every table. The generated hash would also call the role's hash, which is Python code too.
        return 2 * self.index + (self.role is Role.WORKER)

    def __str__(self) -> str:
        return f"/job:{self.role.value}/replica:0/task:{self.index}"

    @property
    def short(self) -> str:
        """``worker 1``, for sentences."""
        return f"{self.role.value} {self.index}"

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """Read the printed form back; ValueError for anything else."""
        return _parsed(text)


@cache
def server(index: int) -> TaskId:
    """Server number ``index``; always the same object, so that tables find it without comparing fields."""
    return TaskId(Role.SERVER, index)


@cache
def worker(index: int) -> TaskId:
    """Worker number ``index``."""
    return TaskId(Role.WORKER, index)


CHIEF = worker(0)


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> TaskId:
    """Kept, because each member of a cluster reads the names of all; bounded, because they come from others."""
    match = re.fullmatch(r"/job:(ps|worker)/replica:0/task:(0|[1-9][0-9]{0,5})", text)
    if match is None:
        raise ValueError(f"{text!r} is not a task name like /job:worker/replica:0/task:0")
    return TaskId(Role(match[1]), int(match[2]))


def hex64(value: int) -> str:
    """An incarnation or job id as people read it."""
    return f"{value:016x}"


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How many servers and workers there are; this also determines the coordinator.

    Without servers every worker is a *rank*: it trains, and it makes the mean of its share of all gradients.
    """

    servers: int
    workers: int

    @property
    def coordinator(self) -> TaskId:
        """Server 0, or worker 0 if there is no server."""
        return server(0) if self.servers else worker(0)

    @property
    def homes(self) -> tuple[TaskId, ...]:
        """The tasks that hold buckets, by the plan's numbers: the servers, or, without any, all workers."""
        return self.server_ids() or self.worker_ids()

    @property
    def savers(self) -> tuple[TaskId, ...]:
        """The tasks that write a checkpoint's shards; without servers the chief alone, as every worker has it all."""
        return self.server_ids() or (CHIEF,)

    def server_ids(self) -> tuple[TaskId, ...]:
        return tuple(server(i) for i in range(self.servers))

    def worker_ids(self) -> tuple[TaskId, ...]:
        return tuple(worker(i) for i in range(self.workers))

    def tasks(self) -> tuple[TaskId, ...]:
        return self.server_ids() + self.worker_ids()
