"""What ``lives.py`` plays with: the scenario, a server's numbers, the disk, and one life of a task."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from lockstep.protocol.effects import JobEnded
from lockstep.protocol.ids import INITIAL_STEP, BucketId, ClusterShape, Incarnation, Step, TaskId
from lockstep.protocol.messages import ParameterEntry
from lockstep.protocol.recovery import Beginning, LossPolicy, RecoveryRules
from lockstep.protocol.task import TaskMachine


def mixed(*values: object) -> int:
    """A number that depends on all of these, the same in every run."""
    return zlib.crc32(repr(values).encode())


@dataclass(frozen=True, slots=True)
class KillPoint:
    """``task`` dies at the ``event``-th event that its machines get, in whichever life: before its effects or after."""

    task: TaskId
    event: int
    effects_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LivesScenario:
    """What is played."""

    servers: int = 2
    workers: int = 2
    steps: int = 6
    buckets: int = 3
    save_steps: int = 2
    policy: LossPolicy = LossPolicy.WAIT
    kills: tuple[KillPoint, ...] = ()
    signals: tuple[tuple[TaskId, int], ...] = ()
    """Who receives SIGTERM, after which of its events; whoever leaves by that is started again."""
    eager: bool = True
    """As the benchmark does it; else as the library: steps are sealed, and states told when the next step begins."""

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(self.servers, self.workers)

    def rules(self) -> RecoveryRules:
        return RecoveryRules(
            on_worker_loss=self.policy,
            rejoin_seconds=60.0,
            returns=self.save_steps > 0,
            save_steps=self.save_steps,
            saves_last=self.save_steps > 0,
        )

    def entries(self) -> tuple[ParameterEntry, ...]:
        return tuple(ParameterEntry(f"layer{n}", 16, "float32", 0) for n in range(self.buckets))


@dataclass(slots=True)
class Shard:
    """A server's numbers: two slots for each bucket, and an optimizer's state that is changed in place."""

    slots: dict[BucketId, list[int]] = field(default_factory=dict)
    momentum: dict[BucketId, int] = field(default_factory=dict)


@dataclass(slots=True)
class Disk:
    """What outlives every task: shards that are being saved, and checkpoints that are complete."""

    parts: dict[tuple[int, int], dict[int, dict[BucketId, tuple[int, int]]]] = field(default_factory=dict)
    complete: dict[int, tuple[dict[BucketId, tuple[int, int]], dict[int, bytes]]] = field(default_factory=dict)

    def beginning(self) -> Beginning:
        if not self.complete:
            return Beginning()
        version = max(self.complete)
        return Beginning(start=version, checkpoint=str(version), states=self.complete[version][1])


@dataclass(slots=True)
class Life:
    """One life of a task: its machines, and what they work on."""

    task: TaskId
    incarnation: Incarnation
    machine: TaskMachine
    alive: bool = True
    lives: dict[TaskId, Incarnation] = field(default_factory=dict)
    links: set[TaskId] = field(default_factory=set)
    met: dict[TaskId, Incarnation] = field(default_factory=dict)
    """The life of each peer that it was linked with last."""
    shard: Shard = field(default_factory=Shard)
    arrivals: dict[int, int] = field(default_factory=dict)
    gradients: dict[BucketId, int] = field(default_factory=dict)
    values: dict[BucketId, int] = field(default_factory=dict)
    versions: dict[BucketId, int] = field(default_factory=dict)
    state: bytes = b""
    untold: Step | None = None
    """The step before which the state has not been told yet."""
    step: Step = INITIAL_STEP
    wanted: int | None = None
    job: int = 0
    ended: JobEnded | None = None
