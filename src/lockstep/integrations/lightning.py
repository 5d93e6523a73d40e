"""Lightning over a Lockstep job: ``Trainer(strategy=LockstepStrategy(job), devices=..., ...)``.

Lightning keeps what it is good at (samplers, metrics, checkpoints, rank zero), in a process group of its own among the
workers. Only DistributedDataParallel is left out, and the optimizers are the job's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lockstep.library.job import Job


class LockstepStrategy(DDPStrategy):  # type: ignore[misc]  # known only where Lightning is installed
    """Lightning's strategy for one process per device, with the job's gradients instead of DDP's."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(**options)
        self._job = job

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._job.wrap(self.model, self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning is accumulating: gradients only add up."""
        with self._job.accumulate():
            yield
