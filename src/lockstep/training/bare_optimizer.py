"""torch's optimizers without its compiler, for servers.

Making an optimizer, and each of its steps, asks ``torch._dynamo`` to keep its hands off the optimizer's methods. To
import it for that takes as long as to import torch itself, before a server can say that it is ready. Servers compile
nothing.
"""

from __future__ import annotations

import inspect
import sys

import torch

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def keep_compiler_out() -> None:
    """From here on an optimizer of this process is made without importing the compiler.

    torch keeps, at each method, what the compiler made of it: here that is the method itself. Where another version of
    torch keeps it elsewhere, the compiler is imported as ever.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in _METHODS:
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        method.__dynamo_disable = method


def step(optimizer: torch.optim.Optimizer) -> None:
    """What ``optimizer.step()`` does, less what torch's compiler and profiler wrap around it; hooks are not called."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
