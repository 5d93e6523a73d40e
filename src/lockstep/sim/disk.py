"""The disk of a simulated cluster: what outlives every task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.protocol.coordinator.recovery import Beginning
from lockstep.protocol.core.ids import BucketId, JobId
from lockstep.sim.memory import VersionTag


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """One bucket of a shard: its bytes, and the optimizer's state."""

    tag: VersionTag
    momentum: int


SavedShard = Mapping[BucketId, SavedBucket]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """All shards of one version, and the workers' local states by index."""

    buckets: SavedShard
    states: Mapping[int, bytes]


@dataclass(slots=True)
class Disk:
    """Shards that are being saved, and checkpoints that are complete."""

    shards: dict[tuple[JobId, int], dict[int, SavedShard]] = field(default_factory=dict)
    """By job and version, then by the index of the server."""
    checkpoints: dict[int, SavedCheckpoint] = field(default_factory=dict)
    """By version."""

    def complete(self, job: JobId, version: int, states: Mapping[int, bytes]) -> None:
        """Make a checkpoint of all shards of this version."""
        shards = self.shards.pop((job, version))
        buckets = {bucket: saved for shard in shards.values() for bucket, saved in shard.items()}
        self.checkpoints[version] = SavedCheckpoint(buckets, states)

    def beginning(self) -> Beginning:
        """Where a job that starts now would begin."""
        if not self.checkpoints:
            return Beginning()
        version = max(self.checkpoints)
        return Beginning(start=version, checkpoint=str(version), states=self.checkpoints[version].states)
