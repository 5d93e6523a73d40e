"""Parts of a run's configuration: data, evaluation, precision, learning-rate schedule. Plain data, torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lockstep.benchmark.data.names import is_real


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where images come from and how they are prepared. Without ``folder`` they are synthetic (except for digits)."""

    folder: str | None = None
    distortions: bool = False
    resize_method: str = "bilinear"
    ml_perf: bool = False
    repeat_sample: bool = False
    processes: int | None = None
    """Decoding processes per worker; None: its share of the cores."""
    prefetch: int = 2
    max_bad_records: int = 10

    def is_real(self, name: str) -> bool:
        """Whether a data set is read."""
        return is_real(name, self.folder)

    def input_processes(self, workers_here: int) -> int:
        """How many processes decode for one worker if ``workers_here`` workers share this machine."""
        if self.processes is not None:
            return self.processes
        return max(1, min(8, len(os.sched_getaffinity(0)) // max(1, workers_here)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """When the model is evaluated on held-out data. At most one of the four ways during training is set."""

    only: bool = False
    """``--eval``: evaluate instead of training."""
    interval_secs: int = 0
    every_n_steps: int | None = None
    every_n_epochs: float | None = None
    at_steps: tuple[int, ...] = ()
    at_epochs: tuple[float, ...] = ()
    batch_size: int = 0
    num_batches: int | None = None
    num_epochs: float | None = None
    stop_at_top_1: float | None = None
    folder: str | None = None

    @property
    def during_training(self) -> bool:
        return bool(self.every_n_steps or self.every_n_epochs or self.at_steps or self.at_epochs)

    def is_due(self, step: int, steps_per_epoch: float) -> bool:
        """Whether to evaluate after timed step ``step`` (counted from 1)."""
        if self.every_n_steps:
            return step % self.every_n_steps == 0
        if self.every_n_epochs:
            # The step that completes a multiple of every_n_epochs.
            every = self.every_n_epochs * steps_per_epoch
            return int(step / every) > int((step - 1) / every)
        if self.at_epochs:
            return any(step - 1 < epoch * steps_per_epoch <= step for epoch in self.at_epochs)
        return step in self.at_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """16-bit arithmetic; parameters, transferred gradients and the optimizer stay 32-bit."""

    use_fp16: bool = False
    use_bf16: bool = False
    loss_scale: float | None = None
    """None: 128 with fp16, as for most models of tf_cnn_benchmarks; bf16 needs none."""
    auto_loss_scale: bool = False
    raise_every: int = 1000

    @property
    def reduced(self) -> bool:
        return self.use_fp16 or self.use_bf16

    @property
    def first_scale(self) -> float:
        """The factor of the loss at the start."""
        if self.loss_scale is not None and self.reduced:
            return self.loss_scale
        return 128.0 if self.use_fp16 else 1.0

    @property
    def raised_every(self) -> int:
        """After how many good steps the factor doubles; 0: never."""
        return self.raise_every if self.auto_loss_scale else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate changes; all empty: the model's own way, or a constant ``--init_learning_rate``."""

    piecewise: str | None = None
    num_epochs_per_decay: float = 0.0
    decay_factor: float = 0.0
    minimum: float = 0.0
    warmup_epochs: float = 0.0
    resnet_base_lr: float | None = None
