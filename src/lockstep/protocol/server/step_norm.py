"""A server's part of the norm of a step's mean: bucket by bucket, then the coordinator's word.

Workers that clip the mean ask for its norm (``Seal.asks``)::

    UNASKED    not every contributor has asked, or not with the gradients that are here. Where they asked in the step
               before, a bucket is measured as soon as it is complete, during backward: the answer is then kept for the
               question that will most likely come
    MEASURING  the store measures the buckets
    TOLD       this server's part is with the coordinator, which adds up all parts
    DECIDED    the norm and the scale are known; whatever is applied in this step is multiplied by it

A decision is never taken back: a server that has heard it applies it, and so do all others when they hear it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import Clip, PartialNorm, ShardNorm, TotalNorm
from lockstep.protocol.core.norms import combined


class StepNormState(StrEnum):
    UNASKED = "unasked"
    MEASURING = "measuring"
    TOLD = "told"
    DECIDED = "decided"


class StepNormTrigger(StrEnum):
    ASK = "every contributor asks"
    MEASURED = "the last bucket is measured"
    DECIDE = "the coordinator decided"
    FORGET = "a gradient was replaced, or another question came"


STEP_NORM_TRANSITIONS: Mapping[tuple[StepNormState, StepNormTrigger], StepNormState] = MappingProxyType(
    {
        (StepNormState.UNASKED, StepNormTrigger.ASK): StepNormState.MEASURING,
        (StepNormState.UNASKED, StepNormTrigger.FORGET): StepNormState.UNASKED,
        # A worker came back after the decision, or its repetition was late.
        (StepNormState.UNASKED, StepNormTrigger.DECIDE): StepNormState.DECIDED,
        (StepNormState.MEASURING, StepNormTrigger.MEASURED): StepNormState.TOLD,
        (StepNormState.MEASURING, StepNormTrigger.FORGET): StepNormState.UNASKED,
        (StepNormState.MEASURING, StepNormTrigger.DECIDE): StepNormState.DECIDED,
        (StepNormState.TOLD, StepNormTrigger.FORGET): StepNormState.UNASKED,
        (StepNormState.TOLD, StepNormTrigger.DECIDE): StepNormState.DECIDED,
        # Of an earlier question of the same step, or of an earlier step.
        (StepNormState.DECIDED, StepNormTrigger.FORGET): StepNormState.UNASKED,
    }
)


class StepNorm:
    """The newest question about a norm, as far as this server has answered it."""

    def __init__(self) -> None:
        self.state = StepNormState.UNASKED
        self.step: Step = INITIAL_STEP
        self.number = 0
        self.clip: Clip | None = None
        self.since = 0.0
        self.attempt = 0
        """What the store measures now; results of an earlier attempt are ignored."""
        self.total: TotalNorm | None = None
        self._begun: set[BucketId] = set()
        self._norms: dict[BucketId, float] = {}
        self._foreseen: tuple[Step, float] | None = None
        """The step, and the kind of norm, that buckets are measured for before the question."""

    def ask(self, step: Step, number: int, clip: Clip, now: float) -> None:
        """Every contributor asks this; perhaps again."""
        if (self.step, self.number) != (step, number):
            self._go(StepNormTrigger.FORGET)
            self.step, self.number = step, number
        self.clip = clip
        if self.state is StepNormState.UNASKED:
            self._go(StepNormTrigger.ASK)
            self.since = now
            if self._foreseen != (step, clip.norm_type):
                self._begin_anew()
        self._foreseen = None

    def foresee(self, step: Step, norm_type: float) -> None:
        """The question will most likely come: what is complete may be measured now."""
        if self._foreseen is None or self._foreseen[0] != step:
            self._begin_anew()
            self._foreseen = (step, norm_type)

    def begin(self, bucket: BucketId) -> bool:
        """Whether the store is to measure this bucket now: once for each attempt."""
        if (self.state is not StepNormState.MEASURING and self._foreseen is None) or bucket in self._begun:
            return False
        self._begun.add(bucket)
        return True

    def measured(self, bucket: BucketId, attempt: int, norm: float) -> None:
        """The norm of a bucket, as this attempt found it."""
        if attempt == self.attempt:
            self._norms[bucket] = norm

    def complete(self, buckets: int, now: float) -> bool:
        """Whether the question is answered by what was measured of all ``buckets``; True once."""
        if self.state is not StepNormState.MEASURING or len(self._norms) < buckets:
            return False
        self._go(StepNormTrigger.MEASURED)
        self.since = now
        return True

    def forget(self) -> None:
        """What was measured is no longer what is here. A decision stays."""
        self._begin_anew()
        if self.state is not StepNormState.DECIDED:
            self._go(StepNormTrigger.FORGET)

    def _begin_anew(self) -> None:
        self.attempt += 1
        self._begun.clear()
        self._norms.clear()

    def decide(self, total: TotalNorm) -> bool:
        """The coordinator's word; returns whether it is new."""
        if self.knows(total.step, total.number) or (total.step, total.number) < (self.step, self.number):
            return False
        if (total.step, total.number) != (self.step, self.number):
            self._go(StepNormTrigger.FORGET)
            self.step, self.number = total.step, total.number
        self.total = total
        self._go(StepNormTrigger.DECIDE)
        return True

    def is_decided_for(self, step: Step) -> bool:
        """Whether the newest question was about this step, and is answered."""
        return self.state is StepNormState.DECIDED and self.step == step

    def knows(self, step: Step, number: int) -> bool:
        """Whether this question is answered."""
        return self.state is StepNormState.DECIDED and (self.step, self.number) == (step, number)

    def partial(self, change: int) -> PartialNorm | None:
        """What the coordinator must know and has not answered."""
        if self.state is not StepNormState.TOLD or self.clip is None:
            return None
        norm = combined(self._norms.values(), self.clip.norm_type)
        return PartialNorm(self.step, self.number, self.clip, change, norm)

    def partial_by_shard(self, change: int, shard_of: Callable[[BucketId], int]) -> PartialNorm | None:
        """The same, for a server that may be the home of several shards."""
        said = self.partial(change)
        if said is None:
            return None
        shards: dict[int, list[float]] = {}
        for bucket, norm in self._norms.items():
            shards.setdefault(shard_of(bucket), []).append(norm)
        parts = [ShardNorm(shard, combined(norms, said.clip.norm_type)) for shard, norms in sorted(shards.items())]
        return replace(said, parts=tuple(parts))

    def _go(self, trigger: StepNormTrigger) -> None:
        self.state = advance(STEP_NORM_TRANSITIONS, self.state, trigger)
