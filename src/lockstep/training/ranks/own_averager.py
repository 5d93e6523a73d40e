"""Buckets carried by our own transports: each rank makes the mean of its share of them, in the order of ranks.

A bucket travels as soon as it is handed over, and its mean comes back while backward goes on. Here it is read where the
rank that made it has it, and copied to where this rank's gradient was: that gradient has been used. So a rank needs no
second memory for means, and the bits are those of one process that adds up all gradients in the order of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.protocol.core.causes import Cause, own_error
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.messages import Layout, Setting
from lockstep.runtime import phrases
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.rank_node import RankNode
from lockstep.training.ranks.averager import NO_STATISTICS_ON_CPUS
from lockstep.training.ranks.layout import RankLayout, formats
from lockstep.training.server.mean_store import CHIEFS, MEAN
from lockstep.training.tensors import as_tensor


class OwnAverager:
    """The mean over all ranks of a cluster."""

    scale = 1.0

    def __init__(self, node: RankNode, layout: RankLayout, untrained: tuple[Setting, ...] = ()) -> None:
        """Announces the model; a rank with another one ends the job, which names the first difference."""
        self.plan = layout.plan
        self._node = node
        self._is_chief = node.task == CHIEF
        self._copied = layout.copied
        known = (*untrained, *_facts(layout))
        announced = Layout(
            self.plan.hash,
            self.plan.bucket_bytes,
            self.plan.parameters,
            (MEAN, CHIEFS),
            known,
            node.start_step,
            node.checkpoint,
        )
        node.prepare(self.plan, announced)
        assert node.gradients is not None
        self.gradients: Tensor = as_tensor(node.gradients.buffer, torch.uint8)
        self.means = self.gradients

    # -- a step --

    def begin(self, step: Step) -> None:
        """It began when the means of the step before were here: forward belongs to it."""
        self._node.raise_if_ended()
        assert step >= 0

    def hand_over(self, step: Step, bucket: BucketId) -> None:
        if self._is_chief or bucket not in self._copied:
            self._node.produced(step, bucket)

    def finish(self, step: Step) -> None:
        absent = () if self._is_chief else tuple(sorted(self._copied))
        self._node.seal(step, absent, occasion="a backward pass", state=None)
        self._take(step + 1)

    def share_with_torch(self) -> None:
        raise ValueError(NO_STATISTICS_ON_CPUS)

    def publish(self, step: Step) -> None:
        every = tuple(bucket.id for bucket in self.plan.buckets)
        if self._is_chief:
            for bucket in every:
                self._node.produced(step, bucket)
        absent = () if self._is_chief else every
        self._node.seal(step, absent, values=True, occasion="job.publish()", state=None)
        self._take(step + 1)

    def take_initial(self) -> Step:
        start = self._node.start_step
        if start > INITIAL_STEP:
            self._node.wait_version(start)
            self._node.release_means()
            self._node.begin_step(start)
            return start
        if self._is_chief:
            self._node.offer_initial()
        self._take(0)
        return 0

    def _take(self, version: int) -> None:
        """Copy each bucket of this version as it arrives; then its step has begun."""
        for bucket in self.plan.buckets:
            self._node.wait_buckets(version, (bucket.id,))
            mean = self._node.mean(bucket.id)
            if mean.nbytes != bucket.nbytes:
                # By the chief's plan, which is not this rank's: the rank that refuses it, by name, ends this wait.
                self._node.wait_buckets(version + 1, (bucket.id,))
            place = self.means[bucket.arena_offset : bucket.arena_offset + bucket.nbytes]
            place.copy_(as_tensor(mean, torch.uint8))
        self._node.wait_version(version)
        self._node.release_means()
        self._node.begin_step(version)

    # -- outside the steps --

    def differs(self, step: Step, parameter: str) -> JobEndedError:  # noqa: ARG002 - the node knows the step
        return JobEndedError(self._node.fail(own_error(phrases.drifted(CHIEF, parameter), Cause.DRIFTED)))

    def leave(self, steps: Step) -> None:
        self._node.finish(steps)
        if self._node.share is not None:
            self._node.share.tell_unsaved()

    def close(self) -> None:
        """The memory is the node's, which frees it."""


def _facts(layout: RankLayout) -> list[Setting]:
    """What must be equal besides names and sizes, under the names by which a difference is reported."""
    buffers = "; ".join(f"{b.dtype} {tuple(b.shape)}" for b in layout.buffers)
    told = {"the kinds of its buffers": buffers, "its memory formats": formats(layout.trained)}
    return [Setting(name, value) for name, value in told.items()]
