"""What turns gradients into new parameters: the servers of a cluster, or this process alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.benchmark.training.job import BenchJob, trained_parameters
from lockstep.protocol.core.messages import GroupRates
from lockstep.runtime.task.lone_node import LoneNode
from lockstep.training.server.named_optimizer import optimizer_options


class Updates(Protocol):
    """What the training loop calls around forward and backward."""

    def start(self) -> None:
        """Block until the initial parameters are in the model."""

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:
        """Forward of this step is about to begin."""

    def end(self) -> None:
        """Backward has ended: the next parameters enter the model, now or during its next forward."""

    def settle(self) -> None:
        """Block until the next parameters are in the model: before anything other than forward uses them."""

    def close(self) -> None: ...


class OneOptimizer:
    """The job's optimizer in this process, for one copy of the model."""

    def __init__(self, job: BenchJob, model: nn.Module) -> None:
        entries = job.optimizers()
        trained = trained_parameters(model)
        groups = [
            {"params": [t.parameter for t in trained if t.group == index], **optimizer_options(entry)}
            for index, entry in enumerate(entries)
        ]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, entries[0].kind)(
            [g for g in groups if g["params"]]
        )
        self._used = [index for index, group in enumerate(groups) if group["params"]]
        self.parameters = [t.parameter for t in trained]

    def use(self, rates: tuple[GroupRates, ...]) -> None:
        """Set the rates of this step."""
        for group, index in zip(self.optimizer.param_groups, self._used, strict=True):
            group.update(zip(rates[index].names, rates[index].values, strict=True))

    def apply(self) -> None:
        """Compute the next parameters from the gradients."""
        self.optimizer.step()

    def forget(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


class LocalUpdates:
    """One process without distribution: the job's optimizer, for tower 0, or for each tower if they are independent.

    ``deferred`` (``--variable_consistency=relaxed``): the gradients of a step are applied at the end of the next one.
    """

    def __init__(self, job: BenchJob, *, deferred: bool = False) -> None:
        self._job = job
        models = job.towers.models if job.towers.independent else job.towers.models[:1]
        self._optimizers = [OneOptimizer(job, model) for model in models]
        self._deferred: list[list[Tensor | None]] | None = None
        if deferred:
            self._deferred = [[None] * len(one.parameters) for one in self._optimizers]

    def start(self) -> None:
        """The model was built with them."""

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:  # noqa: ARG002 - a cluster needs the step
        for one in self._optimizers:
            one.use(rates)

    def end(self) -> None:
        if self._job.scale.judge(p.grad for one in self._optimizers for p in one.parameters):
            if self._deferred is not None:
                self._swap(self._deferred)
            for one in self._optimizers:
                one.apply()
        for one in self._optimizers:
            one.forget()

    def _swap(self, deferred: list[list[Tensor | None]]) -> None:
        for one, kept in zip(self._optimizers, deferred, strict=True):
            for number, parameter in enumerate(one.parameters):
                parameter.grad, kept[number] = kept[number], parameter.grad

    def settle(self) -> None:
        """They are."""

    def close(self) -> None:
        """Nothing to let go of."""


class WatchedUpdates:
    """Wraps the updates of a single process and reports them to the node that watches it."""

    def __init__(self, inner: Updates, node: LoneNode) -> None:
        self._inner = inner
        self._node = node

    def start(self) -> None:
        self._inner.start()
        self._node.ready()

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:
        self._node.begin_step(step)
        self._inner.begin(step, rates)

    def end(self) -> None:
        self._inner.end()
        self._node.step_done()

    def settle(self) -> None:
        self._inner.settle()

    def close(self) -> None:
        self._inner.close()


class NoUpdates:
    """``--forward_only``: parameters stay as they are."""

    def start(self) -> None:
        """They are in the model."""

    def begin(self, step: int, rates: tuple[GroupRates, ...]) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """Nothing to apply."""

    def settle(self) -> None:
        """They are."""

    def close(self) -> None:
        """Nothing to let go of."""
