"""What carries buckets between ranks: the one interface that a model's replica knows, whoever moves the bytes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.protocol.core.ids import BucketId, Step
from lockstep.protocol.core.plan import Plan
from lockstep.runtime.task.outcome import JobEndedError

NO_STATISTICS_ON_CPUS = (
    "SyncBatchNorm works on GPUs only, and this model is on the CPU; use BatchNorm, or train on GPUs with "
    "lockstep.join(backend='nccl')"
)


class ModelsDiffer(Exception):  # noqa: N818 - reads as the fact it states
    """This rank's model is not the chief's; the text names the first difference."""


class Averager(Protocol):
    """The mean over all ranks, bucket by bucket. All its methods are called by the training thread, in turn."""

    plan: Plan
    gradients: Tensor
    """Bytes on the model's device, laid out as the plan says: a bucket must lie here when it is handed over."""
    means: Tensor
    """The same for what comes back. May be the same memory: nobody writes a bucket between ``hand_over`` and
    ``finish``."""
    scale: float
    """Gradients are multiplied by it when they are put into ``gradients``: where the sum is made by somebody who does
    not divide."""

    def begin(self, step: Step) -> None:
        """A backward pass that will be averaged has begun."""

    def hand_over(self, step: Step, bucket: BucketId) -> None:
        """The bucket is filled. In the same order on every rank; never blocks."""

    def finish(self, step: Step) -> None:
        """Every bucket has been handed over: block until every mean is there. JobEndedError if the job ends first.

        On a GPU it is the device's stream that waits, not this thread.
        """

    def take_initial(self) -> Step:
        """Block until the chief's ``gradients`` are in everyone's ``means``: initial values, before the first step.

        Returns the step with which the job begins; where it is not 0, everyone has the values from a checkpoint.
        """

    def share_with_torch(self) -> None:
        """Let torch.distributed's global group exist, for layers that use it (SyncBatchNorm). ValueError if it cannot:
        without it they would silently do without the other ranks."""

    def publish(self, step: Step) -> None:
        """The same in the middle of training, as a step of its own."""

    def differs(self, step: Step, parameter: str) -> JobEndedError:
        """This rank's parameters are not the chief's: end the job, and return the error to raise."""

    def leave(self, steps: Step) -> None:
        """This rank has made all its steps: block until all have; JobEndedError if the job failed."""

    def close(self) -> None:
        """Let go of the memory."""
