"""Which optimizers the servers can run, and what the servers must know about each.

A server has flat buckets and no model, so it can run any optimizer that works element by element: a class of
torch.optim, identified by its name, with plain numbers as options.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lockstep.library.errors import UsageError
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.training.server.named_optimizer import ELEMENTWISE
from lockstep.training.server.rates import numbers_of

WHOLE_TENSOR: Mapping[str, str] = MappingProxyType(
    {
        "LBFGS": "it evaluates the loss several times per step and works on all parameters at once",
        "Adafactor": "it works on whole rows and columns of a matrix, which buckets cut apart",
        "Muon": "it works on whole matrices, which buckets cut apart",
        "SparseAdam": "it needs sparse gradients, which cannot be sent",
    }
)

_LOCAL = frozenset(("capturable", "differentiable"))
"""Options that control how kernels run on the worker's own device; the results do not depend on them."""
_KERNELS = frozenset(("foreach", "fused"))
"""Options that choose among torch's kernels, once: no schedule changes them."""
_FUSED_BY_DEFAULT = frozenset(("Adam", "AdamW", "Adagrad"))
"""Optimizers that servers run with torch's fused kernels unless the program chooses: they make one pass over memory
instead of a dozen. (Servers have a one-pass SGD of their own, with the bits of torch's default.)"""


_INSTEAD = (
    "train without servers (lockstep.join() without servers= and ps_hosts=), where any optimizer works, or use one of "
    f"{', '.join(sorted(ELEMENTWISE))}"
)


@dataclass(frozen=True, slots=True)
class KnownOptimizer:
    """One optimizer of the program, and what is sent to the servers about it."""

    optimizer: torch.optim.Optimizer
    first_group: int
    options: frozenset[str]

    @property
    def groups(self) -> range:
        """Its parameter groups as the plan numbers them."""
        return range(self.first_group, self.first_group + len(self.optimizer.param_groups))

    def entries(self) -> list[OptimizerEntry]:
        kind = type(self.optimizer).__name__
        return [OptimizerEntry(kind, _options_text(kind, group, self.options)) for group in self.optimizer.param_groups]

    def has_made_steps(self) -> bool:
        """Whether it has the state of earlier steps: its own, or loaded."""
        return any(map(is_of_steps, self.optimizer.state.values()))

    def rates(self) -> list[GroupRates]:
        """The current numbers of its groups."""
        return [numbers_of(group, self.options - _KERNELS) for group in self.optimizer.param_groups]


def known_optimizer(optimizer: object, first_group: int) -> KnownOptimizer:
    """Check that servers can run this optimizer; UsageError explains why if they cannot."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"job.wrap() takes a torch optimizer, or a list of them, not {type(optimizer).__name__}; "
            "pass the model first and the optimizer second"
        )
    kind = type(optimizer).__name__
    if kind in WHOLE_TENSOR and getattr(torch.optim, kind, None) is type(optimizer):
        raise UsageError(f"torch.optim.{kind} cannot run on parameter servers: {WHOLE_TENSOR[kind]}; {_INSTEAD}")
    if kind not in ELEMENTWISE or getattr(torch.optim, kind) is not type(optimizer):
        raise UsageError(
            f"the servers only run certain optimizers of torch.optim, and {type(optimizer).__module__}.{kind} is not "
            f"one of them; {_INSTEAD}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError("differentiable=True needs the update in this process, but the servers make it; omit it")
    arguments = frozenset(inspect.signature(type(optimizer)).parameters) - {"params"} - _LOCAL
    return KnownOptimizer(optimizer, first_group, arguments)


def is_of_steps(state: Mapping[str, Any]) -> bool:
    """Whether one parameter's state, or a piece of it, is of an optimizer that has made steps."""
    return bool(state) and float(state.get("step", 1)) > 0


def _options_text(kind: str, group: Mapping[str, object], names: frozenset[str]) -> str:
    plain = {name: _plain(group[name], name) for name in sorted(names) if name in group}
    if kind in _FUSED_BY_DEFAULT and all(plain.get(name) is None for name in _KERNELS):
        plain["fused"] = True
    return json.dumps(plain, sort_keys=True)


def _plain(value: object, name: str) -> object:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(part, name) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise UsageError(f"the optimizer's option {name}={value!r} is not a plain number; the servers take only those")
