"""Buckets carried by our own transports: each rank makes the mean of its share of them, in the order of ranks.

A bucket travels as soon as it is handed over, and its mean comes back while backward goes on. Here it is read where the
rank that made it has it, and copied to where this rank's gradient was: that gradient has been used. So a rank needs no
second memory for means, and the bits are those of one process that adds up all gradients in the order of ranks.

Where gradients travel in 16 bits, what is sent lies in memory of its own. A rank's gradients for its own share are
rounded too: a number must not depend on which rank adds it up.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lockstep.protocol.core.causes import Cause, own_error
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Step
from lockstep.protocol.core.messages import Layout, Setting
from lockstep.runtime import phrases
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.ranks.averager import NO_STATISTICS_ON_CPUS
from lockstep.training.ranks.kept_versions import KeptVersions
from lockstep.training.ranks.layout import RankLayout, formats
from lockstep.training.server.mean_store import CHIEFS, MEAN
from lockstep.training.tensors import as_tensor
from lockstep.training.wire_format import WireFormat


class ComesBack(Protocol):
    """What a rank needs that is lost and comes back, and what it keeps for others (``library/rank_return.py``)."""

    kept: KeptVersions
    late: bool
    """This rank has come back."""
    replayed: Step | None
    """The step that it makes once more although all have made it."""

    def initial(self) -> Tensor: ...

    def means_of(self, step: Step) -> Tensor: ...


class OwnAverager:
    """The mean over all ranks of a cluster."""

    scale = 1.0

    def __init__(
        self, node: WorkerNode, layout: RankLayout, untrained: tuple[Setting, ...] = (), wire: WireFormat | None = None
    ) -> None:
        """Announces the model; a rank with another one ends the job, which names the first difference. ``wire``: the
        format in which gradients travel; the stores of all ranks must know it too."""
        self.plan = layout.plan
        assert node.means is not None
        self._node, self._means = node, node.means
        self._is_chief = node.task == CHIEF
        self._copied = layout.copied
        self._wire = wire or WireFormat()
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
        self._means.prepare(self.plan, announced)
        self._return: ComesBack | None = None
        assert node.gradients is not None
        self._leaving: Tensor = as_tensor(node.gradients.buffer, torch.uint8)
        self.gradients: Tensor = torch.zeros_like(self._leaving) if self._wire.narrows else self._leaving
        self.means = self.gradients

    def come_back_with(self, comes_back: ComesBack) -> None:
        """This job's ranks come back."""
        self._return = comes_back

    def _replays(self, step: Step) -> bool:
        return self._return is not None and self._return.replayed == step

    # -- a step --

    def begin(self, step: Step) -> None:
        """It began when the means of the step before were here: forward belongs to it."""
        self._node.raise_if_ended()
        assert step >= 0

    def hand_over(self, step: Step, bucket: BucketId) -> None:
        if (self._is_chief or bucket not in self._copied) and not self._replays(step):
            # Of the averaged ones, what is no gradient says 0 or 1: rounding leaves it as it is.
            self._produced(step, bucket, in_full=bucket in self._copied)

    def _produced(self, step: Step, bucket: BucketId, *, in_full: bool) -> None:
        if not self._wire.narrows:
            self._node.produced(step, bucket)
            return
        nbytes = self._wire.put(self.plan.buckets[bucket], self.gradients, self._leaving, in_full=in_full)
        self._node.produced(step, bucket, nbytes)

    def finish(self, step: Step) -> None:
        if self._replays(step):
            self._take_replayed(step)
            return
        absent = () if self._is_chief else tuple(sorted(self._copied))
        self._node.seal(step, absent, occasion="a backward pass", state=None)
        self._take(step + 1)

    def share_with_torch(self) -> None:
        raise ValueError(NO_STATISTICS_ON_CPUS)

    def publish(self, step: Step) -> None:
        if self._replays(step):
            self._take_replayed(step)
            return
        every = tuple(bucket.id for bucket in self.plan.buckets)
        if self._is_chief:
            for bucket in every:
                self._produced(step, bucket, in_full=True)
        absent = () if self._is_chief else every
        self._node.seal(step, absent, values=True, occasion="job.publish()", state=None)
        self._take(step + 1)

    def take_initial(self) -> Step:
        start = self._node.start_step
        if start > INITIAL_STEP:
            late = self._return is not None and self._return.late
            if not late:
                self._node.wait_version(start)
                self._means.release()
            self._node.begin_step(start)
            if self._return is not None and late and not start:
                self._put(self._return.initial())
            return start - 1 if self._replays(start - 1) else start
        if self._is_chief:
            if self._wire.narrows:
                self._leaving.copy_(self.gradients)
            self._node.offer_initial()
        self._take(0)
        return 0

    def _take_replayed(self, step: Step) -> None:
        """Every rank has made this step; its means are still to be had."""
        assert self._return is not None
        self._put(self._return.means_of(step))

    def _put(self, means: Tensor) -> None:
        self.means[: means.nbytes].copy_(means)

    def _take_with_word(self, version: int, comes_back: ComesBack) -> None:
        """This rank's own gradients stay until every rank has every mean: a rank that comes back needs them again."""
        self._node.wait_version(version)
        landed = self._means.landed(version)
        self._node.training.wait_word(version - 1)
        comes_back.kept.close(version - 1)
        self._put(as_tensor(landed, torch.uint8))
        self._node.begin_step(version)

    def _take(self, version: int) -> None:
        """Copy each bucket of this version as it arrives; then its step has begun."""
        if self._return is not None:
            self._take_with_word(version, self._return)
            return
        for bucket in self.plan.buckets:
            self._node.wait_buckets(version, (bucket.id,))
            if self._means.replaced_here.get(bucket.id) == version:
                continue
            mean = self._means.of(bucket.id)
            if mean.nbytes != bucket.nbytes:
                # By the chief's plan, which is not this rank's: the rank that refuses it, by name, ends this wait.
                self._node.wait_buckets(version + 1, (bucket.id,))
            place = self.means[bucket.arena_offset : bucket.arena_offset + bucket.nbytes]
            landed = as_tensor(mean, torch.uint8)
            if landed.data_ptr() != place.data_ptr():
                place.copy_(landed)
        self._node.wait_version(version)
        self._means.release()
        self._node.begin_step(version)

    # -- outside the steps --

    def differs(self, step: Step, parameter: str) -> JobEndedError:  # noqa: ARG002 - the node knows the step
        return JobEndedError(self._node.fail(own_error(phrases.drifted(CHIEF, parameter), Cause.DRIFTED)))

    def leave(self, steps: Step) -> None:
        self._node.finish(steps)
        if self._node.share is not None:
            self._node.share.saving.tell_unsaved()

    def close(self) -> None:
        """The memory is the node's, which frees it."""


def _facts(layout: RankLayout) -> list[Setting]:
    """What must be equal besides names and sizes, under the names by which a difference is reported."""
    buffers = "; ".join(f"{b.dtype} {tuple(b.shape)}" for b in layout.buffers)
    told = {"the kinds of its buffers": buffers, "its memory formats": formats(layout.trained)}
    return [Setting(name, value) for name, value in told.items()]
