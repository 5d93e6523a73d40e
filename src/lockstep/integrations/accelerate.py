"""Hugging Face accelerate, and with it transformers' Trainer, over a Lockstep job instead of DDP.

accelerate keeps what it is good at: it shards the data, gathers metrics, and lets only its main process save. It only
must not put the model into DistributedDataParallel, and its optimizer is the job's. Its class is not imported: whatever
kind of accelerator a program has gets these methods in front of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.library.errors import UsageError

if TYPE_CHECKING:
    from lockstep.library.job import Job

_Base: Any = object
"""What ``super()`` finds behind it is the accelerator's own class."""


def attach(job: Job, accelerator: Any) -> None:
    """Let this accelerator train with ``job``: call it before ``prepare()``, or before ``Trainer.train()``.

    ``attach(job, trainer.accelerator)`` does it for transformers' Trainer. Raises UsageError if accelerate does not see
    the processes that the job has.
    """
    if accelerator.num_processes != job.workers:
        raise UsageError(
            f"accelerate counts {accelerator.num_processes} process(es), but the job has {job.workers} workers: create "
            "it after lockstep.join(), and on CPUs with Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"
        )
    if isinstance(accelerator, _JobsAccelerator):
        raise UsageError("this accelerator is attached to a job already; attach each one once")
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (_JobsAccelerator, kind), {"__module__": kind.__module__})
    accelerator.lockstep_job, accelerator.lockstep_optimizers = job, []


class _JobsAccelerator(_Base):  # type: ignore[misc]  # by then it is a class
    """In front of an accelerator's own class."""

    lockstep_job: Any
    lockstep_optimizers: list[torch.optim.Optimizer]
    """Those that are the job's; a Trainer that trains again prepares them again."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the mean: with servers, these clip it, because only they have it."""
        if not self.lockstep_job.servers:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return self.lockstep_job.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """The same, number by number."""
        if not self.lockstep_job.servers:
            super().clip_grad_value_(parameters, clip_value)
            return
        self.unscale_gradients()
        self.lockstep_job.clip_grad_value_(clip_value)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As for evaluation: placed and compiled, but not put into DDP, where gradients would be averaged twice."""
        del evaluation_mode
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """What accelerate does; then the first optimizers, and all models so far, become the job's."""
        prepared = super().prepare(*objects, **options)
        known = {id(one) for one in self.lockstep_optimizers}
        if new := [own for one in self._optimizers if id(own := _own(one)) not in known]:
            models = [one for one in self._models if any(p.requires_grad for p in one.parameters())]
            self.lockstep_job.wrap(models, new)
            self.lockstep_optimizers += new
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes that only add up; ``accumulate()`` comes here too."""
        del model
        with self.lockstep_job.accumulate():
            yield


def _own(optimizer: Any) -> torch.optim.Optimizer:
    """The program's optimizer, inside accelerate's."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, torch.optim.Optimizer)
    return found
