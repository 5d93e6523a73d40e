"""What one benchmark worker computes: model, input, loss, and how its parameters are grouped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.benchmark.models import ModelSpec, find_model
from lockstep.benchmark.models.loss import classification_loss, main_logits
from lockstep.benchmark.outputs.metrics import Accuracy
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.settings.schedules import Rate
from lockstep.benchmark.training.compiling import Stage, compile_model
from lockstep.benchmark.training.cpu_kernels import prefer_onednn
from lockstep.benchmark.training.inputs import (
    Batch,
    DataSet,
    Input,
    InputPlan,
    batches_of,
    open_data_set,
    training_input,
)
from lockstep.benchmark.training.towers import Towers
from lockstep.protocol.core.activity import InputWait
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.training.torch_private import BatchNorm, foreach_norm
from lockstep.training.worker.local_state import WorkerState
from lockstep.training.worker.loss_scale import LossScale
from lockstep.training.worker.replica import Trained

DECAYED, NOT_DECAYED = 0, 1
"""The two parameter groups: weight decay applies to all parameters except those of batch-norm. A model that is compiled
in stages has more groups, all of them decayed: one per additional stage."""

FUSED = ("SGD", "Adam", "AdamW")
"""The torch optimizers that can update a tensor in one pass, on every device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCallbacks:
    """What a job reports: ``on_wait`` what its input waits for, ``on_replica`` which of several devices it is
    working on, ``during`` what takes long and is not a step, ``on_batch`` how many examples a step takes, ``say``
    sentences for people."""

    on_wait: Callable[[InputWait], None] = lambda _wait: None
    on_replica: Callable[[int], None] = lambda _number: None
    during: Callable[[str], contextlib.AbstractContextManager[object]] = lambda _what: contextlib.nullcontext()
    on_batch: Callable[[int], None] = lambda _examples: None
    say: Callable[[str], None] = lambda _sentence: None


class BenchJob:
    """One worker's model and batches on its devices."""

    def __init__(
        self,
        config: BenchConfig,
        worker_index: int,
        devices: Sequence[torch.device],
        callbacks: JobCallbacks | None = None,
    ) -> None:
        self.device = devices[0]
        self.spec: ModelSpec = find_model(config.model, config.data_name)
        self.batch_size = config.run.batch_size or self.spec.default_batch_size
        self.worker_batch = self.batch_size * len(devices)
        self.global_batch = self.worker_batch * config.num_workers
        self.data: DataSet = open_data_set(config)
        self.classes = self.data.classes
        self.images_per_epoch = self.data.size
        run = dataclasses.replace(config.run, num_batches=batches_of(config, self.data.size, self.global_batch))
        self.config = dataclasses.replace(config, run=run)
        torch.manual_seed(config.seed)
        self.model: nn.Module = self.spec.build(self.classes).to(self.device)
        self.model.train()
        if self.device.type == "cpu" and not config.devices.compile:
            prefer_onednn(self.model, self.batch_size)
        self.memory_format = self._memory_format()
        self.towers = Towers(self.model, devices, independent=config.exchange.variable_update == "independent")
        stages = self._compile() if config.devices.compile else []
        self.scale = LossScale(config.precision.first_scale, config.precision.raised_every)
        self.towers.hook_gradients(self.scale, config.optimizer.gradient_clip)
        self.trained = in_groups_of_stages(trained_parameters(self.model), stages)
        self._rate = Rate(config.schedule, config.optimizer.init_learning_rate, self.spec.default_learning_rate)
        held_of = config.num_workers if config.cluster is not None and config.cluster.server_replicas else 0
        describes = worker_index == 0
        self.local_state = WorkerState(self.towers.models, devices, self.scale, describes=describes, held_of=held_of)
        self.first_step = 0
        self._worker_index = worker_index
        self._callbacks = callbacks or JobCallbacks()
        self._inputs: list[Input] = []
        self._last: tuple[Tensor, Tensor] | None = None
        self.last_batch: Batch | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0."""
        return self._worker_index == 0

    def begin_at(self, step: int, state: bytes = b"") -> None:
        """Start at this step, with the state that this worker had before it. Call it before requesting a batch."""
        self.first_step = step
        if state:
            self.local_state.put(state)

    def _open_inputs(self) -> list[Input]:
        """Synthetic data for each tower, or one stream of real data for all of them."""
        around = self._callbacks
        plan = InputPlan(
            spec=self.spec,
            batch=self.batch_size if self.data.source is None else self.worker_batch,
            device=self.device,
            memory_format=self.memory_format,
            worker=self._worker_index,
            first_step=self.first_step,
            on_wait=around.on_wait,
            say=around.say,
        )
        if self.data.source is not None:
            return [training_input(self.config, self.data, plan)]
        return [
            training_input(self.config, self.data, dataclasses.replace(plan, replica=replica, device=device))
            for replica, device in enumerate(self.towers.devices)
        ]

    def _compile(self) -> list[Stage]:
        """Compile every tower; returns the stages of the first."""
        exchange = self.config.exchange
        keeps_gradients = exchange.variable_consistency == "relaxed" or exchange.is_collective
        first, *_ = [compile_model(tower, graphs=not keeps_gradients) for tower in self.towers.models]
        return first

    def _memory_format(self) -> torch.memory_format:
        if self.config.devices.data_format == "NHWC":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
            return torch.channels_last
        return torch.contiguous_format

    def busy(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Report for a block that it takes long and makes no step."""
        return self._callbacks.during(what)

    # -- a step --

    def next_batches(self) -> list[Batch]:
        """One batch per tower. May wait for the input, which starts with the first call."""
        if not self._inputs:
            self._inputs = self._open_inputs()
        batches = self._next_batches()
        self.last_batch = batches[0]
        self._callbacks.on_batch(self.worker_batch)
        return batches

    def _next_batches(self) -> list[Batch]:
        if len(self._inputs) == len(self.towers):
            return [stream.next() for stream in self._inputs]
        images, labels = self._inputs[0].next()
        size = self.batch_size
        return [
            (images[first : first + size].to(device), labels[first : first + size].to(device))
            for first, device in zip(range(0, self.worker_batch, size), self.towers.devices, strict=True)
        ]

    def forward(self) -> Tensor:
        """The loss of one device's next batch, for other training loops around ``model``."""
        return self.loss_of(self.model, self.next_batches()[0])

    def forward_and_backward(self, batches: Sequence[Batch]) -> Tensor:
        """The mean loss over the towers. Tower 0's backward runs last: its gradients are then those of the worker."""
        self.towers.take_values()
        losses = [self._tower_step(number, batches[number]) for number in range(1, len(self.towers))]
        losses.insert(0, self._tower_step(0, batches[0]))
        return losses[0] if len(losses) == 1 else torch.stack([loss.to(self.device) for loss in losses]).mean()

    def _tower_step(self, number: int, batch: Batch) -> Tensor:
        if len(self.towers) > 1:
            self._callbacks.on_replica(number)
        loss = self.loss_of(self.towers.models[number], batch, keep=number == 0)
        (loss * self.scale.factor if self.scale.factor != 1.0 else loss).backward()
        return loss.detach()

    def forward_only(self, batches: Sequence[Batch]) -> Tensor:
        """The loss without gradients."""
        with torch.no_grad():
            losses = [
                self.loss_of(m, b, keep=n == 0)
                for n, (m, b) in enumerate(zip(self.towers.models, batches, strict=True))
            ]
        return torch.stack([loss.to(self.device) for loss in losses]).mean()

    def loss_of(self, model: nn.Module, batch: Batch, keep: bool = False) -> Tensor:
        with self.arithmetic():
            output = model(batch[0])
        if keep and self.config.output.print_training_accuracy:
            self._last = (main_logits(output).detach(), batch[1])
        return classification_loss(output, batch[1])

    def arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """16-bit arithmetic, if requested."""
        precision = self.config.precision
        if not precision.reduced:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.float16 if precision.use_fp16 else torch.bfloat16)

    def training_accuracy(self) -> Accuracy | None:
        """The accuracy on the last batch of tower 0, if requested."""
        if self._last is None:
            return None
        logits, labels = self._last
        top_1, top_5 = correct_guesses(logits, labels)
        return Accuracy(float(top_1) / labels.numel(), float(top_5) / labels.numel())

    def decay_loss(self) -> float:
        """What weight decay adds to the loss. Reads every parameter, so it is computed only when it is printed."""
        decay = self.config.optimizer.weight_decay
        if not decay or self.config.output.loss_type == "base_loss":
            return 0.0
        with torch.no_grad():
            norms = foreach_norm([t.parameter for t in self.trained if t.group != NOT_DECAYED])
            return decay * float(torch.stack(list(norms)).square().sum()) / 2

    @property
    def leaves_gradients_alone(self) -> bool:
        """Whether gradients are sent as backward makes them: 32-bit, of one device, not scaled, clipped or compiled."""
        plain = self.scale.factor == 1.0 and self.config.optimizer.gradient_clip is None
        reduced = self.config.precision.reduced or self.config.devices.compile
        return plain and len(self.towers) == 1 and not reduced

    @property
    def waits_by_layer(self) -> bool:
        """Whether forward may begin before all parameters have arrived: not if compiled or with several towers."""
        return len(self.towers) == 1 and not self.config.devices.compile

    # -- what the updates need --

    def learning_rate(self, step: int) -> float:
        return self._rate.at(step, self.global_batch, self.images_per_epoch)

    def rates(self, step: int) -> tuple[GroupRates, ...]:
        """The rates of each parameter group in this step."""
        rate = GroupRates(("lr",), (self.learning_rate(step),))
        return (rate,) * self._groups

    def _fused(self) -> dict[str, bool]:
        """Compiled arithmetic already rounds differently, so the optimizer may do all its work in one pass too."""
        return {"fused": True} if self.config.devices.compile and self.config.optimizer.kind in FUSED else {}

    @property
    def _groups(self) -> int:
        return max([NOT_DECAYED, *(t.group for t in self.trained)]) + 1

    def optimizers(self) -> tuple[OptimizerEntry, ...]:
        """The optimizer that the servers must run for each parameter group."""
        asked = self.config.optimizer
        entries = []
        for group in range(self._groups):
            decay = 0.0 if group == NOT_DECAYED else asked.weight_decay
            options = {"lr": self.learning_rate(0), "weight_decay": decay, **asked.options(), **self._fused()}
            entries.append(OptimizerEntry(asked.kind, json.dumps(options, sort_keys=True)))
        return tuple(entries)

    def close(self) -> None:
        """End the processes of the input."""
        for stream in self._inputs:
            stream.close()


def correct_guesses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many first guesses are correct, and how many labels are among the first five."""
    guesses = logits.topk(min(5, logits.shape[-1]), dim=-1).indices.flatten(0, -2)
    right = guesses == labels.flatten().unsqueeze(1)
    return right[:, :1].sum(), right.sum()


def trained_parameters(model: nn.Module) -> list[Trained]:
    """The model's parameters, in its order, each with its group."""
    normalising = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, BatchNorm)
        for parameter in module.parameters(recurse=False)
    }
    return [
        Trained(name, parameter, NOT_DECAYED if id(parameter) in normalising else DECAYED)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def in_groups_of_stages(trained: list[Trained], stages: Sequence[Sequence[nn.Module]]) -> list[Trained]:
    """The decayed parameters of each stage but one in a separate group: buckets never hold two groups, so a bucket
    is full, and is sent, as soon as backward has left its stage."""
    group_of: dict[int, int] = {}
    for number, stage in enumerate(stages[1:], start=NOT_DECAYED + 1):
        for module in stage:
            group_of.update((id(parameter), number) for parameter in module.parameters())
    return [
        one if one.group == NOT_DECAYED else dataclasses.replace(one, group=group_of.get(id(one.parameter), one.group))
        for one in trained
    ]
