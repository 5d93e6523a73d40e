"""One shard at its second home: what was handed on is held at once and made in order, with the same bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId
from lockstep.protocol.replication.replica_events import CopyMade, MakeCopy, ReplicaEffect, TakeCopy
from lockstep.protocol.replication.replica_messages import CopyOf, UpdateOf
from lockstep.protocol.replication.shard_home import NOT_HELD


@dataclass(slots=True)
class CopiedBucket:
    """One bucket at its second home."""

    held: int
    """Everything that makes this version is here."""
    made: int
    """The version that the store has made."""
    updates: deque[UpdateOf] = field(default_factory=deque)
    """What is held and not made; the store works on the first one."""
    later: CopyOf | None = None
    """A copy that came while the store worked on an update that it replaces."""


class ShardCopy:
    """One shard at its second home."""

    def __init__(self, shard: int, buckets: Iterable[BucketId], *, from_start: bool) -> None:
        """``from_start``: nothing has been made yet, so this copy is whole."""
        self.shard = shard
        begin = INITIAL_STEP if from_start else NOT_HELD
        self.buckets = {bucket: CopiedBucket(begin, begin) for bucket in buckets}

    def on_update(self, update: UpdateOf) -> list[ReplicaEffect]:
        """Hold it if it is the next one. One that is here already is only confirmed; after a gap comes a copy."""
        bucket = self.buckets[update.bucket]
        if update.step != bucket.held:
            return []
        bucket.held += 1
        bucket.updates.append(update)
        return [MakeCopy(update)] if len(bucket.updates) == 1 else []

    def on_copy(self, copy: CopyOf) -> list[ReplicaEffect]:
        bucket = self.buckets[copy.bucket]
        if copy.version <= bucket.held:
            return []
        if bucket.updates:
            bucket.later = copy
            return []
        bucket.held = bucket.made = copy.version
        return [TakeCopy(copy)]

    def on_made(self, event: CopyMade) -> tuple[list[ReplicaEffect], bool]:
        """What the store does next; and whether what it made has the digest of the home's."""
        bucket = self.buckets[event.bucket]
        update = bucket.updates.popleft()
        assert update.step == event.step, (
            f"the store made step {event.step} of bucket {event.bucket}, not {update.step}"
        )
        bucket.made = event.step + 1
        same = update.digest in ("", event.digest)
        if bucket.updates:
            return [MakeCopy(bucket.updates[0])], same
        later, bucket.later = bucket.later, None
        return ([] if later is None else self.on_copy(later)), same

    def held(self, bucket: BucketId) -> int:
        return self.buckets[bucket].held

    @property
    def is_made(self) -> bool:
        """Whether the store has made all that is held."""
        return all(bucket.made == bucket.held for bucket in self.buckets.values())

    def check(self) -> None:
        for number, bucket in self.buckets.items():
            waiting = len(bucket.updates)
            assert bucket.made + waiting == bucket.held, f"bucket {number}: {bucket.made} + {waiting}, {bucket.held}"
