"""The means that a rank reads: a worker of a cluster without servers, which also makes the mean of its share.

Version *s + 1* of a bucket is the mean of the gradients of step *s*, and version 0 is what the chief began with. A rank
lends its gradients to the rank that has the bucket, and each reads the mean where that one has it, if the link allows
that. What a rank has for its own share it lends to itself: there is no link, and nothing is copied.
"""

from __future__ import annotations

from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.messages import Layout
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.task.training_side import TrainingSide
from lockstep.transports.base import Loan


class RankMeans:
    """Where the newest mean of each bucket is. The training thread calls this beside its side (``TrainingSide``)."""

    def __init__(self, training: TrainingSide, *, ranks_return: bool) -> None:
        """``ranks_return``: a rank that comes back may need the gradients of others again, so all stay as they are."""
        self.replaced_here: dict[BucketId, int] = {}
        """The version of each bucket of its own share that its store has last written where the gradient was."""
        self._training = training
        self._ranks_return = ranks_return
        self._loans: dict[BucketId, Loan] = {}
        self._replaced: set[BucketId] = set()
        """Buckets whose newest version is where the gradient was."""

    def prepare(self, plan: Plan, layout: Layout) -> None:
        """Allocate memory for this plan and announce the model, whose gradients go to ``gradients``."""
        self._training.allocate(plan, in_place=not self._ranks_return)
        self._training.lands_in_gradients = not self._ranks_return
        self._training.announce(layout, self._on_mean)

    def of(self, bucket: BucketId) -> memoryview:
        """The newest version of a bucket, once ``wait_version`` has returned; readable until ``release``."""
        loan = self._loans.get(bucket)
        if loan is not None:
            return loan.buffer
        training = self._training
        assert training.plan is not None
        whole = training.plan.buckets[bucket]
        region = training.gradients if bucket in self._replaced else training.parameters
        assert region is not None
        return region.buffer[whole.arena_offset : whole.arena_offset + whole.nbytes]

    def landed(self, version: int) -> memoryview:
        """Where ranks come back: all buckets of a version that ``wait_version`` has waited for, as they came. They stay
        so until the version after the next comes."""
        plan = self._training.plan
        assert plan is not None
        arena = self._training.landing(version).buffer
        for bucket, loan in self._loans.items():
            place = plan.buckets[bucket]
            arena[place.arena_offset : place.arena_offset + place.nbytes] = loan.buffer
        self.release()
        return arena[: plan.arena_bytes]

    def release(self) -> None:
        """The means have been read. This must come before the next step begins: their memory is needed for it."""
        while self._loans:
            self._loans.popitem()[1].release()

    # -- the loop's thread --

    def _on_mean(self, bucket: BucketId, version: int, loan: Loan | None) -> None:
        if loan is not None:
            self._loans[bucket] = loan
        elif self._training.landed_in_gradients(bucket, version):
            self._replaced.add(bucket)
        else:
            self._replaced.discard(bucket)
