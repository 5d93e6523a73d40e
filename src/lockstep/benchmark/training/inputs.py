"""Where a worker's batches come from: synthetic data, which costs nothing, or a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from lockstep.benchmark.data.arrays import ArrayBatches
from lockstep.benchmark.data.device_batches import DeviceBatches
from lockstep.benchmark.data.open_dataset import open_source
from lockstep.benchmark.data.order import OnceThrough, Order, SameAgain, TrainingOrder
from lockstep.benchmark.data.pipeline import Batches, DecodePipeline, InputOptions
from lockstep.benchmark.data.source import TRAIN, ArraySource, Source
from lockstep.benchmark.data.transforms import Preparation
from lockstep.benchmark.models import ModelSpec, dataset_classes
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.synthetic import synthetic_batch, synthetic_generator
from lockstep.protocol.core.activity import InputWait
from lockstep.protocol.core.ids import Role
from lockstep.protocol.core.timing import REJOIN_SECONDS

IMAGES_PER_EPOCH: Mapping[str, int] = MappingProxyType({"imagenet": 1_281_167, "cifar10": 50_000})

Batch = tuple[Tensor, Tensor]
"""Images and labels, on the device."""


class Input(Protocol):
    """A stream of batches on a device."""

    def next(self) -> Batch:
        """The next one."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DataSet:
    """What a run trains on, and how large it is."""

    source: Source | None
    """None: the data is synthetic."""
    classes: int
    size: int


_opened: dict[tuple[str, str | None], DataSet] = {}
"""What a spare has opened before it became a worker."""


def open_ahead(config: BenchConfig) -> None:
    """Open the training data now, for the next ``open_data_set`` in this process."""
    _opened[config.data_name, config.data.folder] = open_data_set(config)


def open_data_set(config: BenchConfig, split: str = TRAIN) -> DataSet:
    """The data of a run. Raises BadData, with one sentence, if it cannot be used."""
    ahead = _opened.pop((config.data_name, config.data.folder), None) if split == TRAIN else None
    if ahead is not None:
        return ahead
    if not config.data.is_real(config.data_name):
        return DataSet(None, dataset_classes(config.data_name), IMAGES_PER_EPOCH[config.data_name])
    source = open_source(config.data_name, config.data.folder, split)
    return DataSet(source, source.classes, len(source))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """For which device batches are made, and in which form."""

    spec: ModelSpec
    batch: int
    device: torch.device
    memory_format: torch.memory_format
    worker: int = 0
    replica: int = 0
    first_step: int = 0
    on_wait: Callable[[InputWait], None] = lambda _wait: None
    say: Callable[[str], None] = lambda _sentence: None


class SyntheticInput:
    """One synthetic batch, repeated: images, or whatever else the model takes."""

    def __init__(self, config: BenchConfig, classes: int, plan: InputPlan) -> None:
        generator = synthetic_generator(config.seed, plan.worker, plan.replica)
        if plan.spec.make_batch is not None:
            rows, answers = plan.spec.make_batch(plan.batch, generator)
            self._batch = (rows.to(plan.device), answers.to(plan.device))
            return
        made = synthetic_batch(
            generator,
            batch_size=plan.batch,
            image_size=plan.spec.image_size,
            num_classes=classes,
            input_channels=plan.spec.input_channels,
            device=plan.device,
            memory_format=plan.memory_format,
        )
        self._batch = (made.images, made.labels)

    def next(self) -> Batch:
        return self._batch

    def close(self) -> None:
        """Nothing to end."""


def training_input(config: BenchConfig, data: DataSet, plan: InputPlan) -> Input:
    """The batches of a worker's training."""
    if data.source is None:
        return SyntheticInput(config, data.classes, plan)
    shuffled = TrainingOrder(data.size, plan.batch, plan.worker, config.num_workers, config.seed)
    order = SameAgain(shuffled) if config.data.repeat_sample else shuffled
    return _feed(config, data.source, order, plan, training=True)


def evaluation_input(config: BenchConfig, data: DataSet, plan: InputPlan) -> Input:
    """Every image once, in order, pass after pass."""
    if data.source is None:
        return SyntheticInput(config, data.classes, plan)
    return _feed(config, data.source, OnceThrough(data.size, plan.batch), plan, training=False)


def _feed(config: BenchConfig, source: Source, order: Order, plan: InputPlan, *, training: bool) -> Input:
    asked = config.data
    workers_here = 1 if config.cluster is None else config.cluster.beside_own_task(Role.WORKER)
    how = Preparation(
        plan.spec.image_size,
        training=training,
        distort_colors=asked.distortions and training,
        resize_method=asked.resize_method,
        seed=config.seed,
    )
    batches: Batches
    if isinstance(source, ArraySource):
        batches = ArrayBatches(source, order, how, plan.first_step)
    else:
        options = InputOptions(
            processes=asked.input_processes(workers_here),
            prefetch=asked.prefetch,
            max_bad_records=asked.max_bad_records,
            patience=input_patience(config),
            on_wait=plan.on_wait,
            on_bad=plan.say,
        )
        batches = DecodePipeline(source, order, how, options, plan.first_step)
    return DeviceBatches(batches, plan.device, plan.memory_format, subtract_means=asked.ml_perf)


def input_patience(config: BenchConfig) -> float:
    """How long reading a file may take: as long as the job waits for a lost task."""
    return config.cluster.rejoin_timeout if config.cluster is not None else REJOIN_SECONDS


def batches_of(config: BenchConfig, size: int, global_batch: int) -> int:
    """The timed steps of the run: the number given, or the number that its epochs need."""
    epochs = config.run.num_epochs
    return config.run.num_batches if epochs is None else max(1, math.ceil(epochs * size / global_batch))
