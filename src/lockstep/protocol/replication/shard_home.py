"""One shard at its home: versions are made here, handed on, and known to workers only once the second home holds them.

Each bucket is at a version *v* that every worker may have, and collects step *v*::

    CATCHING_UP   this home has just taken over, and its store still makes what had been handed on
    COLLECTING    not every contributor's gradient and facts are here
    COMPLETE      all are here; making waits for the commit of the step before
    MAKING        the store makes version v+1
    HANDED_ON     made here; the second home does not hold it yet

and back to COLLECTING at version *v+1*. A second home that is not whole is filled in the background, one bucket after
another, and nothing waits for it; it is whole once it holds the newest version of every bucket, and from then on
everything does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.placement import Homes
from lockstep.protocol.replication.replica_events import MakeVersion, ReplicaEffect, SendCopy, VersionMade
from lockstep.protocol.replication.replica_messages import UpdateFacts, UpdateOf
from lockstep.protocol.replication.speech import Speech

NOT_HELD = INITIAL_STEP - 1
"""The version that a second home holds of a bucket before it holds anything."""


class HomeBucketState(StrEnum):
    CATCHING_UP = "catching up"
    COLLECTING = "collecting"
    COMPLETE = "complete"
    MAKING = "making"
    HANDED_ON = "handed on"


class HomeBucketTrigger(StrEnum):
    CAUGHT_UP = "what had been handed on is made"
    COMPLETE = "last gradient arrived"
    REOPEN = "a gradient is missing again"
    MAKE = "making began"
    MADE = "next version made"
    HELD = "the second home holds it"
    NOT_AWAITED = "no second home is whole"


HOME_BUCKET_TRANSITIONS: Mapping[tuple[HomeBucketState, HomeBucketTrigger], HomeBucketState] = MappingProxyType(
    {
        (HomeBucketState.COLLECTING, HomeBucketTrigger.COMPLETE): HomeBucketState.COMPLETE,
        (HomeBucketState.COMPLETE, HomeBucketTrigger.REOPEN): HomeBucketState.COLLECTING,
        (HomeBucketState.COMPLETE, HomeBucketTrigger.MAKE): HomeBucketState.MAKING,
        (HomeBucketState.MAKING, HomeBucketTrigger.MADE): HomeBucketState.HANDED_ON,
        (HomeBucketState.HANDED_ON, HomeBucketTrigger.HELD): HomeBucketState.COLLECTING,
        (HomeBucketState.HANDED_ON, HomeBucketTrigger.NOT_AWAITED): HomeBucketState.COLLECTING,
        (HomeBucketState.CATCHING_UP, HomeBucketTrigger.CAUGHT_UP): HomeBucketState.COLLECTING,
    }
)


@dataclass(slots=True)
class HomeBucket:
    """One bucket at its home."""

    id: BucketId
    version: int = INITIAL_STEP
    """The newest version that workers may have."""
    state: HomeBucketState = HomeBucketState.COLLECTING
    gradients: dict[TaskId, int] = field(default_factory=dict)
    update: UpdateOf | None = None
    """What made the version that is handed on."""
    sent: int = NOT_HELD
    """The version up to which the second home was sent everything."""
    held: int = NOT_HELD
    """The version up to which it says that it holds everything."""

    def advance(self, trigger: HomeBucketTrigger) -> None:
        self.state = advance(HOME_BUCKET_TRANSITIONS, self.state, trigger)

    @property
    def has_value(self) -> bool:
        """Whether the newest version is in the store and may be copied."""
        return self.state in (HomeBucketState.COLLECTING, HomeBucketState.COMPLETE)


class FactsOfSteps:
    """What workers have said of their steps; shared by all shards of one server."""

    def __init__(self, workers: tuple[TaskId, ...]) -> None:
        self.workers = workers
        self._facts: dict[tuple[TaskId, Step], UpdateFacts] = {}

    def note(self, worker: TaskId, facts: UpdateFacts) -> None:
        self._facts.setdefault((worker, facts.step), facts)

    def contributors(self, step: Step) -> tuple[TaskId, ...]:
        return (CHIEF,) if step == INITIAL_STEP else self.workers

    def of(self, step: Step) -> dict[TaskId, UpdateFacts] | None:
        """What all contributors said of this step; None: not all have."""
        found = {w: self._facts[w, step] for w in self.contributors(step) if (w, step) in self._facts}
        return found if len(found) == len(self.contributors(step)) else None

    def forget(self, worker: TaskId) -> None:
        for key in [key for key in self._facts if key[0] == worker]:
            del self._facts[key]

    def forget_before(self, step: Step) -> None:
        for key in [key for key in self._facts if key[1] < step]:
            del self._facts[key]


class ShardHome:
    """One shard at its home."""

    def __init__(
        self, shard: int, buckets: Mapping[BucketId, int], facts: FactsOfSteps, *, whole: bool, digest_every: int
    ) -> None:
        """``buckets``: the version of each. ``whole``: its second home holds as much (nothing, at the start).
        ``digest_every``: after how many steps both homes compare what they made."""
        self.shard = shard
        self._digest_every = digest_every
        self.buckets = {bucket: HomeBucket(bucket, version) for bucket, version in buckets.items()}
        self.waits_for_second = whole
        """Nothing is known to workers that the second home does not hold."""
        self.committed: Step = INITIAL_STEP - 1
        self._copied = NOT_HELD
        """The newest version that was copied to the second home: it has none of the versions before."""
        self._facts = facts
        self._second: TaskId | None = None
        self._second_life: Incarnation = 0
        if whole:
            for bucket in self.buckets.values():
                bucket.sent = bucket.held = bucket.version

    @property
    def made(self) -> Step:
        """The newest step that is made and known in all buckets."""
        return min(bucket.version for bucket in self.buckets.values()) - 1

    @property
    def may_be_called_whole(self) -> bool:
        """The second home could take over: it holds the newest versions, and those before that may be asked for."""
        return self.waits_for_second and self._copied <= self.committed + 1

    # -- the view --

    def place(self, homes: Homes, speech: Speech) -> list[ReplicaEffect]:
        """The view that this shard is in; everything that is open is said again, to the second home that it has now."""
        second = homes.second_task
        life = 0 if second is None else speech.members[second]
        if (second, life) != (self._second, self._second_life) and not homes.whole:
            self.waits_for_second = False
            for bucket in self.buckets.values():
                bucket.sent = bucket.held = NOT_HELD
        self._second, self._second_life = second, life
        effects: list[ReplicaEffect] = []
        for bucket in self.buckets.values():
            if bucket.state is HomeBucketState.HANDED_ON:
                effects += self._hand_on(bucket, speech)
            elif not self.waits_for_second:
                bucket.sent = bucket.held
        return effects + self._copy_next(speech)

    # -- gradients --

    def take(self, worker: TaskId, step: Step, bucket_id: BucketId, tensor: int) -> bool:
        """Whether this gradient is wanted; a duplicate is not."""
        bucket = self.buckets[bucket_id]
        open_states = (HomeBucketState.CATCHING_UP, HomeBucketState.COLLECTING, HomeBucketState.COMPLETE)
        if step != bucket.version or bucket.state not in open_states or worker in bucket.gradients:
            return False
        bucket.gradients[worker] = tensor
        return True

    def forget(self, worker: TaskId) -> None:
        """Another incarnation of this worker computes its step again."""
        for bucket in self.buckets.values():
            if bucket.state in (HomeBucketState.MAKING, HomeBucketState.HANDED_ON):
                continue
            bucket.gradients.pop(worker, None)
            if bucket.state is HomeBucketState.COMPLETE:
                bucket.advance(HomeBucketTrigger.REOPEN)

    def make_what_is_complete(self) -> list[ReplicaEffect]:
        effects: list[ReplicaEffect] = []
        for bucket in self.buckets.values():
            facts = self._facts.of(bucket.version)
            if facts is None:
                continue
            if bucket.state is HomeBucketState.COLLECTING and self._is_complete(bucket, facts):
                bucket.advance(HomeBucketTrigger.COMPLETE)
            if bucket.state is HomeBucketState.COMPLETE and self.committed >= bucket.version - 1:
                bucket.advance(HomeBucketTrigger.MAKE)
                effects.append(self._make(bucket, facts))
        return effects

    def _is_complete(self, bucket: HomeBucket, facts: Mapping[TaskId, UpdateFacts]) -> bool:
        return all(bucket.id in said.absent or worker in bucket.gradients for worker, said in facts.items())

    def _make(self, bucket: HomeBucket, facts: Mapping[TaskId, UpdateFacts]) -> MakeVersion:
        giving = [worker for worker, said in facts.items() if bucket.id not in said.absent]
        without = [set(facts[worker].without) for worker in giving]
        void = any(said.void for said in facts.values())
        update = UpdateOf(
            bucket.version,
            bucket.id,
            0,
            facts[CHIEF].rates,
            facts[CHIEF].clip,
            tuple(sorted(set.intersection(*without))) if without else (),
            void,
            any(said.values for said in facts.values()),
        )
        gradients = () if void else tuple(bucket.gradients[worker] for worker in giving)
        return MakeVersion(update, gradients, digests=(bucket.version + 1) % self._digest_every == 0)

    # -- handing on --

    def on_made(self, event: VersionMade, update: UpdateOf, speech: Speech) -> list[ReplicaEffect]:
        bucket = self.buckets[event.bucket]
        bucket.advance(HomeBucketTrigger.MADE)
        bucket.update = replace(update, mean=event.mean, digest=event.digest)
        return self._hand_on(bucket, speech)

    def _hand_on(self, bucket: HomeBucket, speech: Speech) -> list[ReplicaEffect]:
        assert bucket.update is not None
        effects: list[ReplicaEffect] = []
        complete_there = self.waits_for_second or bucket.sent == bucket.version
        if self._second is not None and complete_there:
            effects += speech.to(self._second, bucket.update)
            bucket.sent = bucket.version + 1
        if not self.waits_for_second:
            self._release(bucket, HomeBucketTrigger.NOT_AWAITED)
        return effects

    def on_held(self, bucket_id: BucketId, version: int, speech: Speech) -> list[ReplicaEffect]:
        bucket = self.buckets[bucket_id]
        bucket.held = max(bucket.held, version)
        if bucket.state is HomeBucketState.HANDED_ON and bucket.held > bucket.version:
            self._release(bucket, HomeBucketTrigger.HELD)
        if not self.waits_for_second:
            self.waits_for_second = all(one.held == one.version for one in self.buckets.values())
        return self._copy_next(speech)

    def _release(self, bucket: HomeBucket, trigger: HomeBucketTrigger) -> None:
        """The next version may be known to all."""
        bucket.advance(trigger)
        bucket.version += 1
        bucket.gradients.clear()
        bucket.update = None

    def _copy_next(self, speech: Speech) -> list[ReplicaEffect]:
        """In the background: one bucket at a time, the next when the second home holds it."""
        if self._second is None or self.waits_for_second or not speech.reaches(self._second):
            return []
        if any(bucket.sent > NOT_HELD and bucket.held < bucket.sent for bucket in self.buckets.values()):
            return []
        for bucket in self.buckets.values():
            if bucket.sent < bucket.version and bucket.has_value and bucket.version > INITIAL_STEP:
                bucket.sent = bucket.version
                self._copied = max(self._copied, bucket.version)
                return [SendCopy(self._second, speech.view, bucket.id, bucket.version)]
        return []

    # -- what others may ask --

    def readable(self, bucket_id: BucketId, version: int) -> bool:
        """Whether a worker may have this version now."""
        bucket = self.buckets[bucket_id]
        if bucket.state is HomeBucketState.CATCHING_UP or version <= INITIAL_STEP:
            return False
        if version == bucket.version:
            return True
        # The version before stays in its slot until the next one is made.
        return version == bucket.version - 1 and bucket.has_value

    def check(self) -> None:
        for bucket in self.buckets.values():
            ahead = bucket.version - (self.committed + 1)
            assert ahead in (0, 1), f"bucket {bucket.id} is at {bucket.version}, committed {self.committed}"
            if self.waits_for_second:
                assert bucket.held >= bucket.version, f"bucket {bucket.id} is known at {bucket.version}, and not held"
