"""Detects misuse of a wrapped model before a step is made; each mistake has its own one-sentence error."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lockstep.library.errors import UsageError
from lockstep.library.optimizers import KnownOptimizer
from lockstep.training.torch_private import changes_of
from lockstep.training.worker.binding import Bound
from lockstep.training.worker.sealed_replica import SealedReplica


class MisuseWatch:
    """Compares a model with its state at the time it was wrapped."""

    def __init__(self, models: Sequence[nn.Module], replica: SealedReplica) -> None:
        self._models = models
        self._replica = replica
        self._parameters = self._present()
        self._devices = [parameter.device for parameter in self._parameters]
        self._sealed: dict[int, tuple[int, ...]] = {}

    def _present(self) -> list[nn.Parameter]:
        return [parameter for model in self._models for parameter in model.parameters()]

    def check(self) -> None:
        """Raise UsageError if this model can no longer be trained the way it was wrapped."""
        present = self._present()
        if len(present) != len(self._parameters):
            raise UsageError(
                f"the model has {len(present)} parameters, but had {len(self._parameters)} when it was wrapped; "
                "add or remove parameters before job.wrap()"
            )
        for index, (now, before) in enumerate(zip(present, self._parameters, strict=True)):
            if now is not before:
                raise UsageError(self._moved(self._name(before), self._devices[index], now))
        for bound in self._replica.bound_parameters():
            parameter = bound.trained.parameter
            if parameter.data_ptr() != bound.local.data_ptr():
                raise UsageError(self._moved(bound.trained.name, bound.local.device, parameter))
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"the gradient of {bound.trained.name!r} is sparse, but servers take only dense gradients; build "
                    "that layer with sparse=False, or train without servers"
                )

    def _name(self, parameter: nn.Parameter) -> str:
        known: Sequence[Bound] = self._replica.bound_parameters()
        return next((b.trained.name for b in known if b.trained.parameter is parameter), "(not trained)")

    def _moved(self, name: str, before: object, now: Tensor) -> str:
        what = f"moved from {before} to {now.device}" if before != now.device else "moved to different memory"
        return (
            f"parameter {name!r} was {what} after job.wrap(); move or convert the model before wrapping it, and load "
            "values with load_state_dict()"
        )

    # -- one step per backward pass --

    def refuse_second_step(self, known: KnownOptimizer) -> None:
        """Raise UsageError if the gradients have not changed since they were applied."""
        if self._replica.backward_since_step.intersection(known.groups):
            return
        grads = _grads(known)
        if grads and grads == self._sealed.get(known.first_group):
            raise UsageError(
                "optimizer.step() was called twice for the same gradients; call it once after each backward pass, and "
                "optimizer.zero_grad() before the next"
            )

    def sealed(self, known: KnownOptimizer) -> None:
        """Record that these gradients have been applied."""
        self._sealed[known.first_group] = _grads(known)


def _grads(known: KnownOptimizer) -> tuple[int, ...]:
    """Which gradients exist, and how often each was written."""
    found: list[int] = []
    for group in known.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                found += (id(parameter.grad), changes_of(parameter.grad))
    return tuple(found)
