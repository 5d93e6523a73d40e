"""Numbers instead of tensors: what the stores and workers of a job with second homes make.

Every number depends on everything that went into it, in order, so anything lost, doubled or made of something else
than in the undisturbed run gives other numbers.
"""

from __future__ import annotations

from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Step, TaskId
from lockstep.protocol.core.messages import GroupRates
from lockstep.protocol.replication.replica_events import CopyMade, MakeCopy, MakeVersion, StepComputed, VersionMade
from lockstep.protocol.replication.replica_messages import CopyOf, UpdateFacts, UpdateOf
from lockstep.sim.numbers import mixed
from lockstep.sim.violation import Rule, Violation

KINDS = 3
"""Steps are, in turn, plain ones with an absent bucket, void ones, and ones that publish values."""


class ReplicaStore:
    """The store of one server: two versions of each bucket, and its optimizer's state."""

    def __init__(self) -> None:
        self._values: dict[BucketId, dict[int, int]] = {}
        self._momentum: dict[BucketId, int] = {}

    def make(self, effect: MakeVersion) -> VersionMade:
        update, given = effect.update, effect.gradients
        mean = 0 if not given else given[0] if update.values else mixed(given)
        self._make(update, mean)
        digest = self._digest(update.bucket, update.step) if effect.digests else ""
        return VersionMade(update.bucket, update.step, mean, digest)

    def make_copy(self, effect: MakeCopy) -> CopyMade:
        update = effect.update
        self._make(update, update.mean)
        digest = self._digest(update.bucket, update.step) if update.digest else ""
        return CopyMade(update.bucket, update.step, digest)

    def _make(self, update: UpdateOf, mean: int) -> None:
        bucket, step = update.bucket, update.step
        base = 0 if step == INITIAL_STEP else self.value(bucket, step)
        self._values.setdefault(bucket, {})[step + 1] = self._next(update, mean, base)
        self._values[bucket].pop(step - 1, None)

    def _next(self, update: UpdateOf, mean: int, base: int) -> int:
        if update.void or not mean:
            return base
        if update.values:
            return mean
        inputs = (mean, update.rates, update.clip, update.without)
        self._momentum[update.bucket] = mixed(self._momentum.get(update.bucket, 0), inputs)
        return mixed(base, self._momentum[update.bucket])

    def _digest(self, bucket: BucketId, step: Step) -> str:
        return f"{mixed(self.value(bucket, step + 1), self._momentum.get(bucket, 0)):08x}"

    def value(self, bucket: BucketId, version: int) -> int:
        held = self._values.get(bucket, {})
        if version not in held:
            raise Violation(Rule.UNKNOWN_VERSION, f"version {version} of bucket {bucket} is asked for; here: {held}")
        return held[version]

    def copy(self, bucket: BucketId, version: int) -> CopyOf:
        return CopyOf(bucket, version, self.value(bucket, version), self._momentum.get(bucket, 0))

    def take(self, copy: CopyOf) -> None:
        self._values[copy.bucket] = {copy.version: copy.tensor}
        self._momentum[copy.bucket] = copy.state


def computed(
    worker: TaskId, workers: int, step: Step, buckets: int, values: tuple[tuple[BucketId, int], ...], state: bytes
) -> StepComputed:
    """What this worker makes of these values; the same whenever it is computed again."""
    if step == INITIAL_STEP:
        first = tuple((bucket, mixed("initial", bucket)) for bucket in range(buckets))
        return StepComputed(step, first, UpdateFacts(step, values=True), b"")
    kind = step % KINDS
    absent: set[BucketId] = set()
    if kind == 0:
        absent = {(step + worker.index) % buckets} if worker.index == workers - 1 else set()
    elif kind == KINDS - 1 and worker != CHIEF:
        absent = set(range(buckets))
    facts = UpdateFacts(
        step,
        tuple(sorted(absent)),
        (step, worker.index),
        void=kind == 1 and worker.index == workers - 1,
        values=kind == KINDS - 1,
        rates=(GroupRates(("lr",), (0.1 * (step + 1),)),) if worker == CHIEF else (),
        clip=0.5 / (step + 1) if worker == CHIEF else None,
    )
    gradients = tuple((b, mixed(worker.index, step, b, values, state)) for b in range(buckets) if b not in absent)
    return StepComputed(step, gradients, facts, mixed(state, step).to_bytes(4, "big"))
