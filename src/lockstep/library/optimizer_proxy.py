"""The program's own optimizer object with its ``step`` replaced: the servers make the step.

The object stays the same, so schedulers, gradient scalers and ``param_groups`` keep working; only its class becomes a
subclass that hands over the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.library.errors import UsageError
from lockstep.training.torch_private import mark_as_wrapped_by_scheduler, rewrap_step


class StepMaker(Protocol):
    """Makes the steps of a wrapped optimizer."""

    def make_step(self, optimizer: torch.optim.Optimizer, void: bool, scales: bool) -> None: ...

    def state_for_a_copy(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]: ...


class WrappedOptimizer(torch.optim.Optimizer):
    """Mixed into the class of the program's optimizer."""

    _step_supports_amp_scaling = True
    """A gradient scaler then reports what it found and calls ``step`` anyway: all workers must skip together."""
    _lockstep: StepMaker
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Hand the gradients to the servers; block until the next parameters are in the model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # schedulers check this
        found = getattr(self, "found_inf", None)
        void = found is not None and bool(found.item())
        scale = getattr(self, "grad_scale", None)
        if scale is not None and not void:
            # Gradients that were clipped already are refused as changed: a scaler must have unscaled them before.
            _unscale(self, scale)
        self._lockstep.make_step(self, void, scales=found is not None or scale is not None)
        return loss

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """A copy, or what is saved, is an ordinary optimizer of the program's class, with the servers' state."""
        return object.__new__, (type(self).__mro__[2],), self._lockstep.state_for_a_copy(self)

    mark_as_wrapped_by_scheduler(step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - whatever it is
        raise UsageError(
            "a parameter was added to the optimizer after job.wrap(), but the servers do not have it; give the "
            "optimizer all parameters before wrapping (frozen ones may be unfrozen later)"
        )


def wrap_optimizer(optimizer: torch.optim.Optimizer, maker: StepMaker) -> torch.optim.Optimizer:
    """Replace ``step`` of this object."""
    kind = type(optimizer)
    # A scheduler that was created earlier has put its own wrapper on the object, which would hide ours.
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(kind.__name__, (WrappedOptimizer, kind), {"__module__": kind.__module__})
    optimizer._lockstep = maker  # type: ignore[attr-defined]  # it is a WrappedOptimizer from now on
    rewrap_step(optimizer)
    return optimizer


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its own ``step`` back."""
    if not isinstance(optimizer, WrappedOptimizer):
        return
    optimizer.__class__ = type(optimizer).__mro__[2]
    optimizer.__dict__.pop("_lockstep", None)


def _unscale(optimizer: torch.optim.Optimizer, scale: torch.Tensor) -> None:
    # The scaler itself multiplies by the reciprocal; so do we, for the same bits.
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device, parameter.grad.dtype))
