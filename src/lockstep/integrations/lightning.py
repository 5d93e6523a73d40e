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
        self._job: Any = job

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._job.wrap(self.model, self.optimizers)
        if self._job.servers:
            # Only they have the mean, which is what Lightning means to clip.
            self.precision_plugin.clip_grad_by_norm = self._clip_norm
            self.precision_plugin.clip_grad_by_value = self._clip_value

    def _clip_norm(self, optimizer: Any, clip_val: float) -> None:
        self._job.clip_grad_norm_(clip_val, optimizer=self._given(optimizer))

    def _clip_value(self, optimizer: Any, clip_val: float) -> None:
        self._job.clip_grad_value_(clip_val, optimizer=self._given(optimizer))

    @staticmethod
    def _given(optimizer: Any) -> Any:
        """What was wrapped, inside Lightning's own object."""
        return getattr(optimizer, "_optimizer", optimizer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning is accumulating: gradients only add up."""
        with self._job.accumulate():
            yield
