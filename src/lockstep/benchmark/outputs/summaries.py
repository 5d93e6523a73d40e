"""``--summary_verbosity``: what TensorBoard shows about a run.

1: scalars; 2: also all gradients in one histogram; 3: also each gradient and parameter, and images.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.benchmark.outputs.event_file import EventFile
from lockstep.benchmark.outputs.observers import RunObserver, StepFacts
from lockstep.benchmark.training.evaluation import Evaluated
from lockstep.benchmark.training.inputs import Batch
from lockstep.benchmark.training.job import BenchJob

SCALARS, ALL_GRADIENTS, EVERYTHING = 1, 2, 3
_SMALLEST = 1e-30
_PICTURES = 3


class Summaries(RunObserver):
    """Writes event files. With servers, gradients are sent while backward runs, so histograms show parameters only."""

    def __init__(self, job: BenchJob, folder: str, verbosity: int, every: int) -> None:
        self._job = job
        self._events = EventFile(Path(folder))
        self._verbosity = verbosity
        self._every = every

    def step(self, facts: StepFacts) -> None:
        if self._every and facts.number % self._every:
            return
        values = {
            "learning_rate": facts.learning_rate,
            "total_loss": facts.loss,
            "images_per_sec": facts.speed.mean,
        }
        if facts.accuracy is not None:
            values |= {"top_1_accuracy": facts.accuracy.top_1, "top_5_accuracy": facts.accuracy.top_5}
        self._events.scalars(facts.step + 1, values)
        if self._verbosity >= EVERYTHING:
            for trained in self._job.trained:
                self._events.histogram(facts.step + 1, trained.name, _numbers(trained.parameter))
            self._pictures(facts.step + 1, self._job.last_batch)

    def gradients(self, job: BenchJob, step: int) -> None:
        timed = step - job.config.run.num_warmup_batches + 1
        every = self._every or job.config.output.display_every
        if self._verbosity < ALL_GRADIENTS or timed < 1 or (timed != 1 and timed % every):
            return
        found = [(t.name, t.parameter.grad) for t in job.trained if t.parameter.grad is not None]
        if not found:
            return
        sizes = np.concatenate([np.abs(_numbers(gradient)) for _, gradient in found])
        self._events.histogram(step + 1, "log_gradients", np.log(np.maximum(sizes, _SMALLEST)))
        if self._verbosity >= EVERYTHING:
            for name, gradient in found:
                self._events.histogram(step + 1, f"{name}/gradients", _numbers(gradient))

    def evaluated(self, step: int, result: Evaluated) -> None:
        self._events.scalars(step, {"eval/Accuracy@1": result.accuracy.top_1, "eval/Accuracy@5": result.accuracy.top_5})

    def _pictures(self, step: int, batch: Batch | None) -> None:
        if batch is None or batch[0].dim() != 4:
            return  # tokens are not an image
        with contextlib.suppress(ImportError):  # Pillow comes with the extra "data"; images are a bonus
            for number, picture in enumerate(_pngs(batch[0][:_PICTURES])):
                self._events.image(step, f"images/{number}", picture, batch[0].shape[3], batch[0].shape[2])

    def close(self) -> None:
        self._events.close()


class EvaluationEvents(RunObserver):
    """``--eval_dir``: the accuracy of each evaluation, for TensorBoard. The first evaluation creates the file."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._events: EventFile | None = None

    def evaluated(self, step: int, result: Evaluated) -> None:
        if self._events is None:
            self._events = EventFile(self._folder)
        accuracy = result.accuracy
        self._events.scalars(step, {"eval/Accuracy@1": accuracy.top_1, "eval/Accuracy@5": accuracy.top_5})

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    flat: np.ndarray[tuple[int], np.dtype[np.float32]] = tensor.detach().float().flatten().cpu().numpy()
    return flat


def _pngs(images: Tensor) -> Sequence[bytes]:
    from PIL import Image

    pixels = ((images.detach().float() + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    made = []
    for picture in pixels:
        out = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(picture)).save(out, "PNG")
        made.append(out.getvalue())
    return made
