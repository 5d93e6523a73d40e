"""Steps of torch's fused Adam or AdamW on some tensors, without the optimizer's own Python.

``Optimizer.step()`` sorts and checks its tensors anew each time, which takes longer than the call of the kernel and,
with many threads, keeps all of them waiting for the interpreter. This makes the same two calls with the same numbers;
``tests/training/server/test_bucket_optimizer.py`` compares the bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.training.torch_private import foreach_add_, fused_adam_, fused_adamw_


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``AdamSteps`` does what this optimizer would do, once it has a state."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    group = optimizer.param_groups[0]
    return bool(group.get("fused")) and not (group.get("capturable") or group.get("differentiable"))


class AdamSteps:
    """The next step of some tensors that have one optimizer's settings: all that can be done once is done here."""

    def __init__(self, group: Mapping[str, Any], states: Sequence[Mapping[str, Tensor]], *, decoupled: bool) -> None:
        """``states``: what torch keeps for each of them. Their steps are counted at once."""
        self._kernel = fused_adamw_ if decoupled else fused_adam_
        self._states = [
            ([s["exp_avg"]], [s["exp_avg_sq"]], [s["max_exp_avg_sq"]] if group["amsgrad"] else [], [s["step"]])
            for s in states
        ]
        self._numbers = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
        self._numbers["beta1"], self._numbers["beta2"] = group["betas"]
        foreach_add_([s["step"] for s in states], 1)

    def make(self, number: int, values: Tensor, gradient: Tensor) -> None:
        """Update these values in place; the gradient is only read. Any thread, each number once."""
        self._kernel([values], [gradient], *self._states[number], **self._numbers, grad_scale=None, found_inf=None)


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its weight decay is AdamW's."""
    decoupled = optimizer.param_groups[0].get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return bool(decoupled)
