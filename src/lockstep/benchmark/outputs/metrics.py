"""Speeds and the lines that report them: pure functions of numbers, without torch and without printing.

Formats and formulas are those of tf_cnn_benchmarks, so that scripts which read its output read ours; only the
banner's first line differs (``Lockstep:`` for ``TensorFlow:``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.ma

_LABEL_WIDTH = 13
_RULE = "-" * 64
_NORMAL_CONSISTENCY = 1.4826
"""Multiplied by the median absolute deviation, this gives the standard deviation of normal noise."""

_MODES_WITH_ALL_REDUCE = frozenset({"replicated", "distributed_all_reduce", "collective_all_reduce"})


@dataclass(frozen=True, slots=True)
class Speed:
    """Images per second: the mean, its uncertainty, and the jitter of single steps."""

    mean: float
    uncertainty: float
    jitter: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Fractions of a batch, 0 to 1, whose class was the first guess or among the first five."""

    top_1: float
    top_5: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """What a run prints before it starts.

    Attributes:
        version: of Lockstep.
        model: its name as asked for.
        dataset: name of the data set.
        synthetic: whether the data is synthetic.
        mode: ``training``, ``evaluation``, ``training + evaluation`` or ``forward only``.
        single_session: whether one process drives all devices of the cluster.
        global_batch: images of one step on all workers.
        device_batch: images of one step on one device.
        batches_per_group: shown if input is prepared in groups of more than one batch.
        num_batches: timed steps.
        num_epochs: passes over the data set that these steps make.
        devices: names of this worker's devices.
        numa_bind: whether threads are bound to a memory node.
        data_format: ``NCHW`` or ``NHWC``.
        optimizer: its name.
        variable_update: the mode.
        all_reduce_spec: shown in the modes that reduce without servers.
        cross_replica_sync: shown if it is not None, that is with ``--job_name``.
        staged_vars: shown if true.
    """

    version: str
    model: str
    dataset: str
    synthetic: bool
    mode: str
    single_session: bool = False
    global_batch: int
    device_batch: int
    batches_per_group: int = 1
    num_batches: int
    num_epochs: float
    devices: Sequence[str]
    numa_bind: bool = False
    data_format: str = "NCHW"
    optimizer: str
    variable_update: str
    all_reduce_spec: str | None = None
    cross_replica_sync: bool | None = None
    staged_vars: bool = False


def step_speed(batch_size: int, step_times: Sequence[float], ewma: float | None = None) -> Speed:
    """The speed over the steps so far.

    Args:
        batch_size: images of one step.
        step_times: seconds of each timed step, oldest first; at least one, all above 0.
        ewma: if given and not 0, the mean step time is exponentially weighted, and this is the weight of the newest
            step (``--display_perf_ewma``); uncertainty and jitter are still those of all steps.
    """
    times = np.asarray(step_times, dtype=np.float64)
    speeds = batch_size / times
    weights = None if not ewma else (1.0 - ewma) ** np.arange(len(times) - 1, -1, -1, dtype=np.float64)
    return Speed(
        mean=float(batch_size / np.average(times, weights=weights)),
        uncertainty=float(np.std(speeds) / math.sqrt(len(speeds))),
        jitter=float(_NORMAL_CONSISTENCY * np.median(np.abs(speeds - np.median(speeds)))),
    )


def total_speed(num_workers: int, num_steps: int, worker_batch: int, seconds: float) -> float:
    """Images per second of the whole cluster, if all workers have made the same number of steps."""
    return num_workers * num_steps * worker_batch / seconds


def epochs_of(num_batches: int, global_batch: int, images_per_epoch: int) -> float:
    """Passes over the data set in this many steps."""
    return num_batches * global_batch / images_per_epoch


def is_reported(step: int, display_every: int) -> bool:
    """Whether a timed step, counted from 1, gets a line: the first and every ``display_every``-th."""
    return step == 1 or step % display_every == 0


def step_header(loss_name: str = "total_loss", accuracy: bool = False) -> str:
    """The line above the step lines."""
    header = f"Step\tImg/sec\t{loss_name}"
    return header + "\ttop_1_accuracy\ttop_5_accuracy" if accuracy else header


def step_line(step: int, speed: Speed, loss: float, accuracy: Accuracy | None = None) -> str:
    """The line of a timed step, counted from 1."""
    speeds = f"images/sec: {speed.mean:.1f} +/- {speed.uncertainty:.1f} (jitter = {speed.jitter:.1f})"
    line = f"{step}\t{speeds}\t{loss:.3f}"
    if accuracy is not None:
        line += f"\t{accuracy.top_1:.3f}\t{accuracy.top_5:.3f}"
    return line


def total_lines(images_per_second: float) -> tuple[str, str, str]:
    """The last lines of a run."""
    return _RULE, f"total images/sec: {images_per_second:.2f}", _RULE


def eval_step_line(step: int, examples_per_second: float) -> str:
    """The line of a step of an evaluation, counted from 1."""
    return f"{step}\t{examples_per_second:.1f} examples/sec"


def eval_result_line(accuracy: Accuracy, examples: int) -> str:
    """The result of an evaluation."""
    return f"Accuracy @ 1 = {accuracy.top_1:.4f} Accuracy @ 5 = {accuracy.top_5:.4f} [{examples} examples]"


def banner_lines(banner: Banner) -> list[str]:
    """What a run prints before it starts, line by line."""
    dataset = f"{banner.dataset} (synthetic)" if banner.synthetic else banner.dataset
    lines = [
        _labelled("Lockstep", banner.version),
        _labelled("Model", banner.model),
        _labelled("Dataset", dataset),
        _labelled("Mode", banner.mode),
        _labelled("SingleSess", banner.single_session),
        _labelled("Batch size", f"{banner.global_batch} global"),
        " " * _LABEL_WIDTH + f"{banner.device_batch} per device",
    ]
    if banner.batches_per_group > 1:
        # tf_cnn_benchmarks misspells "preprocessing" this way, and scripts match it.
        lines.append(" " * _LABEL_WIDTH + f"{banner.batches_per_group} batches per prepocessing group")
    lines += [
        _labelled("Num batches", banner.num_batches),
        _labelled("Num epochs", f"{banner.num_epochs:.2f}"),
        _labelled("Devices", list(banner.devices)),
        _labelled("NUMA bind", banner.numa_bind),
        _labelled("Data format", banner.data_format),
        _labelled("Optimizer", banner.optimizer),
        _labelled("Variables", banner.variable_update),
    ]
    if banner.variable_update in _MODES_WITH_ALL_REDUCE:
        lines.append(_labelled("AllReduce", banner.all_reduce_spec))
    if banner.cross_replica_sync is not None:
        lines.append(_labelled("Sync", banner.cross_replica_sync))
    if banner.staged_vars:
        lines.append(_labelled("Staged vars", banner.staged_vars))
    return [*lines, "=========="]


def _labelled(label: str, value: object) -> str:
    return f"{label + ':':<{_LABEL_WIDTH}}{value}"
