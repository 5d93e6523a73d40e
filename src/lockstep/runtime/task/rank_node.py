"""A rank: a worker of a cluster without servers, which also makes the mean of a share of all gradients.

Version *s + 1* of a bucket is the mean of the gradients of step *s*, and version 0 is what the chief began with. A rank
lends its gradients to the rank that has the bucket, and each reads the mean where that one has it, if the link allows
that. What a rank has for its own share it lends to itself: there is no link, and nothing is copied.
"""

from __future__ import annotations

from lockstep.protocol.core.ids import BucketId, TaskId
from lockstep.protocol.core.messages import Layout
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.task.node import Say
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.share_side import MakeStore, ShareSide
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.transports.base import Loan


class RankNode(WorkerNode):
    """One rank. Its training thread calls what that of a worker calls, and reads means instead of parameters."""

    share: ShareSide

    def __init__(self, config: NodeConfig, make_store: MakeStore, say: Say, reporter: TaskReporter) -> None:
        super().__init__(config, say, reporter, make_store)
        self._means: dict[BucketId, Loan] = {}
        self.replaced_here: dict[BucketId, int] = {}
        """The version of each bucket of its own share that its store has last written where the gradient was."""
        self._replaced: set[BucketId] = set()
        """Buckets whose newest version is where the gradient was."""
        self.wait_word, self.landing, self.ask_within = (
            self.training.wait_word,
            self.training.landing,
            self.training.ask_within,
        )

    # -- called by the training thread --

    def prepare(self, plan: Plan, layout: Layout) -> None:
        """Allocate memory for this plan and announce the model, whose gradients go to ``gradients``."""
        self.allocate(plan, in_place=not self.rules.ranks_return)
        # A rank that comes back may need the gradients of others again.
        self.training.lands_in_gradients = not self.rules.ranks_return
        self.announce(layout, self._on_mean)

    def mean(self, bucket: BucketId) -> memoryview:
        """The newest version of a bucket, once ``wait_version`` has returned; readable until ``release_means``."""
        loan = self._means.get(bucket)
        if loan is not None:
            return loan.buffer
        assert self.plan is not None
        whole = self.plan.buckets[bucket]
        region = self.gradients if bucket in self._replaced else self.parameters
        assert region is not None
        return region.buffer[whole.arena_offset : whole.arena_offset + whole.nbytes]

    def landed(self, version: int) -> memoryview:
        """Where ranks come back: all buckets of a version that ``wait_version`` has waited for, as they came. They stay
        so until the version after the next comes."""
        assert self.plan is not None
        arena = self.landing(version).buffer
        for bucket, loan in self._means.items():
            place = self.plan.buckets[bucket]
            arena[place.arena_offset : place.arena_offset + place.nbytes] = loan.buffer
        self.release_means()
        return arena[: self.plan.arena_bytes]

    @property
    def others(self) -> list[TaskId]:
        """The ranks with which a link is up."""
        return [task for task, keeper in self.peers.items() if keeper.linked]

    def release_means(self) -> None:
        """The means have been read. This must come before the next step begins: their memory is needed for it."""
        while self._means:
            self._means.popitem()[1].release()

    # -- the loop's thread --

    def _on_mean(self, bucket: BucketId, version: int, loan: Loan | None) -> None:
        if loan is not None:
            self._means[bucket] = loan
        elif self.training.landed_in_gradients(bucket, version):
            self._replaced.add(bucket)
        else:
            self._replaced.discard(bucket)
