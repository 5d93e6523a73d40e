"""Evaluation: how often a model's first guess, and its first five, are right on the held-out part of the data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.benchmark.data.errors import BadData
from lockstep.benchmark.data.source import VALIDATION
from lockstep.benchmark.models import ModelSpec, find_model
from lockstep.benchmark.models.loss import main_logits
from lockstep.benchmark.outputs.metrics import Accuracy, eval_result_line, eval_step_line, is_reported, total_lines
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.inputs import DataSet, InputPlan, evaluation_input, open_data_set
from lockstep.benchmark.training.job import correct_guesses
from lockstep.training.export import FINAL_NAME

Emit = Callable[[str], None]
OnBatch = Callable[[int, int], None]
"""Called with (batches done, batches in all)."""


def shows_nothing(_done: int, _total: int) -> None:
    """Without a terminal."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of one evaluation."""

    accuracy: Accuracy
    examples: int
    examples_per_sec: float


class Evaluation:
    """Evaluates the models of one run."""

    def __init__(self, config: BenchConfig, device: torch.device, memory_format: torch.memory_format) -> None:
        self._config = config
        self._device = device
        self._format = memory_format
        self.spec: ModelSpec = find_model(config.model, config.data_name)
        self.data: DataSet = open_data_set(config, VALIDATION)
        self.batch = config.evaluation.batch_size or config.run.batch_size or self.spec.default_batch_size

    @property
    def batches(self) -> int:
        """The number of batches per evaluation."""
        asked = self._config.evaluation
        if asked.num_batches is not None:
            return asked.num_batches
        if self.data.source is None and asked.num_epochs is None:
            return self._config.run.num_batches
        return max(1, math.ceil((asked.num_epochs or 1.0) * self.data.size / self.batch))

    def run(self, model: nn.Module, emit: Emit, on_batch: OnBatch = shows_nothing) -> Evaluated:
        """Evaluate once and print the lines of tf_cnn_benchmarks. The model is left unchanged."""
        plan = InputPlan(spec=self.spec, batch=self.batch, device=self._device, memory_format=self._format, say=emit)
        stream = evaluation_input(self._config, self.data, plan)
        was_training = model.training
        model.eval()
        try:
            return self._count(model, stream.next, emit, on_batch)
        finally:
            model.train(was_training)
            stream.close()

    def _count(
        self,
        model: nn.Module,
        next_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        emit: Emit,
        on_batch: OnBatch,
    ) -> Evaluated:
        right_1 = torch.zeros((), dtype=torch.int64, device=self._device)
        right_5 = torch.zeros((), dtype=torch.int64, device=self._device)
        examples = 0
        begin = time.perf_counter()
        with torch.no_grad():
            for number in range(1, self.batches + 1):
                images, labels = next_batch()
                first, among_five = correct_guesses(main_logits(model(images)), labels)
                right_1 += first
                right_5 += among_five
                examples += labels.numel()
                if is_reported(number, self._config.output.display_every):
                    emit(eval_step_line(number, examples / (time.perf_counter() - begin)))
                on_batch(number, self.batches)
        accuracy = Accuracy(int(right_1) / examples, int(right_5) / examples)
        rate = examples / (time.perf_counter() - begin)
        emit(eval_result_line(accuracy, examples))
        return Evaluated(accuracy, examples, rate)


def load_parameters(model: nn.Module, folder: str) -> Path | None:
    """Load the parameters that a training run left in ``folder`` into the model; None if there are none yet."""
    path = Path(folder) / FINAL_NAME
    if not path.exists():
        return None
    try:
        model.load_state_dict(load_file(path))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise BadData(
            f"{path} does not match this model ({reason}); give the --model and --data_dir that it was trained with."
        ) from None
    return path


def evaluate_once(
    evaluation: Evaluation, model: nn.Module, folder: str, emit: Emit, on_batch: OnBatch = shows_nothing
) -> Evaluated | None:
    """One evaluation of the parameters in ``folder``; prints a line and returns None if there are none."""
    if load_parameters(model, folder) is None:
        emit(f"Checkpoint not found in {folder}")
        return None
    result = evaluation.run(model, emit, on_batch)
    for line in total_lines(result.examples_per_sec):
        emit(line)
    return result
