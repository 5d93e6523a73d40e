"""The training loop of the benchmark: warm-up, then timed steps, then the total."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.benchmark.outputs.metrics import (
    Accuracy,
    is_reported,
    step_header,
    step_line,
    step_speed,
    total_lines,
    total_speed,
)
from lockstep.benchmark.outputs.observers import RunObserver, StepFacts
from lockstep.benchmark.training.evaluation import Evaluation
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.updates import Updates
from lockstep.runtime.garbage import spared_collector
from lockstep.training.parameter_watch import NotFiniteParameter, ParametersNotFinite, ParameterWatch

Emit = Callable[[str], None]


class Progress(Protocol):
    """A live progress bar, if there is a terminal."""

    def stage(self, what: str) -> None: ...

    def warm_up(self, done: int, total: int) -> None: ...

    def step(self, done: int, total: int, images_per_second: float) -> None: ...

    def evaluation(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of a run on this worker."""

    num_workers: int
    num_steps: int
    average_wall_time: float
    images_per_sec: float
    last_average_loss: float
    accuracy: Accuracy | None = None
    """From the last evaluation, if there was one."""


def train(
    job: BenchJob, updates: Updates, emit: Emit, progress: Progress, observer: RunObserver | None = None
) -> BenchResult:
    """Run the whole job on this worker."""
    loop = _Loop(job, updates, emit, progress, observer or RunObserver())
    loop.warm_up()
    with spared_collector():
        return loop.timed_steps()


class _Loop:
    def __init__(self, job: BenchJob, updates: Updates, emit: Emit, progress: Progress, observer: RunObserver) -> None:
        self._job = job
        self._updates = updates
        self._emit = emit
        self._progress = progress
        self._observer = observer
        self._run = job.config.run
        self._output = job.config.output
        self._times: list[float] = []
        self._loss = float("nan")
        self._evaluation: Evaluation | None = None
        self._accuracy: Accuracy | None = None
        self._watch = parameter_watch(job)
        if job.config.evaluation.during_training:
            self._evaluation = Evaluation(job.config, job.device, job.memory_format)

    def warm_up(self) -> None:
        self._updates.start()
        self._observer.started(self._job)
        self._emit("Running warm up")
        self._progress.stage("compiling, in the first step" if self._job.config.devices.compile else "first step")
        for step in range(self._job.first_step, self._run.num_warmup_batches):
            loss = self._one_step(step)
            if step == self._job.first_step:
                self._loss_of_report(loss)  # its kernels are loaded on first use, which must not be in a timed step
            self._progress.warm_up(step + 1, self._run.num_warmup_batches)
        self._updates.settle()
        self._observer.warmed_up()
        self._emit("Done warm up")
        self._emit(step_header(self._output.loss_type, self._output.print_training_accuracy))

    def timed_steps(self) -> BenchResult:
        job = self._job
        _finish_device(job.device)
        evaluating = 0.0
        started = last = time.perf_counter()
        number = done = max(0, job.first_step - self._run.num_warmup_batches)
        for number in range(done + 1, self._run.num_batches + 1):
            step = self._run.num_warmup_batches + number - 1
            loss = self._one_step(step)
            if is_reported(number, self._output.display_every) or number == self._run.num_batches:
                self._loss = self._loss_of_report(loss)
            now = time.perf_counter()
            self._times.append(now - last)
            self._report(number, step)
            stop = self._evaluate(number, step)
            last = time.perf_counter() if self._evaluation is not None else now
            evaluating += last - now
            if stop:
                break
        self._updates.settle()
        _finish_device(job.device)
        seconds = time.perf_counter() - started - evaluating
        self._judge(self._watch.look_now(self._run.num_warmup_batches + number - 1))
        return self._total(number, number - done, seconds)

    def _loss_of_report(self, loss: Tensor) -> float:
        """The loss that a step line shows; waits for the device and for all parameters."""
        self._updates.settle()
        return float(loss.detach()) + self._job.decay_loss()

    def _one_step(self, step: int) -> Tensor:
        """Forward (parameters of later layers may arrive while it runs), backward (buckets are sent while it runs)."""
        job, during = self._job, self._observer.during
        with during("input", step):
            batches = job.next_batches()
        self._updates.begin(step, job.rates(step))
        with during("forward and backward", step):
            loss = job.forward_only(batches) if self._run.forward_only else job.forward_and_backward(batches)
        self._observer.gradients(job, step)
        self._judge(self._watch.look(step - 1))
        with during("update", step):
            self._updates.end()
        return loss

    def _judge(self, found: NotFiniteParameter | None) -> None:
        """End the run, or say it once."""
        if found is None:
            return
        if self._job.config.on_nan_parameters == "stop":
            raise ParametersNotFinite(f"stopped the run: {found}; lower --init_learning_rate")
        self._emit(f"{found}; the run goes on, since --on_nan_parameters is report")

    def _report(self, number: int, step: int) -> None:
        speed = step_speed(self._job.worker_batch, self._times, self._output.display_perf_ewma)
        if is_reported(number, self._output.display_every):
            accuracy = self._job.training_accuracy()
            self._emit(step_line(number, speed, self._loss, accuracy))
            rate = self._job.learning_rate(step)
            self._observer.step(StepFacts(number, step, speed, self._loss, rate, accuracy))
        self._progress.step(number, self._run.num_batches, speed.mean)

    def _evaluate(self, number: int, step: int) -> bool:
        """Evaluate if it is due; True if the accuracy that ends the run is reached."""
        asked, job = self._job.config.evaluation, self._job
        if self._evaluation is None or not asked.is_due(number, job.images_per_epoch / job.global_batch):
            return False
        self._updates.settle()
        self._emit(f"Running evaluation at global_step {step + 1}")
        with job.busy("evaluation"):
            result = self._evaluation.run(job.model, self._emit, self._progress.evaluation)
        self._accuracy = result.accuracy
        self._observer.evaluated(step + 1, result)
        if asked.stop_at_top_1 is None or result.accuracy.top_1 < asked.stop_at_top_1:
            return False
        self._emit(f"Stopping, as the top 1 accuracy {result.accuracy.top_1:.4f} has reached {asked.stop_at_top_1:g}")
        return True

    def _total(self, number: int, steps: int, seconds: float) -> BenchResult:
        """``steps`` of the ``number`` were done here; a worker that had nothing left to do has no speed."""
        self._progress.close()
        workers = self._job.config.num_workers
        total = total_speed(workers, steps, self._job.worker_batch, seconds) if steps else 0.0
        for line in total_lines(total):
            self._emit(line)
        self._observer.finished(total, self._run.num_warmup_batches + number)
        return BenchResult(workers, steps, seconds / max(1, steps), total, self._loss, self._accuracy)


def parameter_watch(job: BenchJob) -> ParameterWatch:
    """Of the first worker: all of them have the same parameters."""
    named = [(one.name, one.parameter) for one in job.trained]
    return ParameterWatch(named if job.is_first and not job.config.run.forward_only else [])


def _finish_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
