"""One step of torch's fused Adam or AdamW on one tensor, without the optimizer's own Python.

``Optimizer.step()`` sorts and checks its tensors anew each time, which takes longer than the call of the kernel and,
with many threads, keeps all of them waiting for the interpreter. This makes the same two calls with the same numbers;
``tests/training/server/test_bucket_optimizer.py`` compares the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.training.torch_private import fused_adam_, fused_adamw_


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``adam_step`` does what this optimizer would do, once it has a state."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    group = optimizer.param_groups[0]
    return bool(group.get("fused")) and not (group.get("capturable") or group.get("differentiable"))


def adam_step(optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor], values: Tensor, gradient: Tensor) -> None:
    """Update these values in place; the gradient is only read."""
    group: dict[str, Any] = optimizer.param_groups[0]
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    kernel = fused_adamw_ if decoupled else fused_adam_
    beta1, beta2 = group["betas"]
    state["step"].add_(1)
    kernel(
        [values],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [state["step"]],
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
