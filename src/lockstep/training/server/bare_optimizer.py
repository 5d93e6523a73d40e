"""torch's optimizers without its compiler, for servers.

Creating an optimizer, and each of its steps, imports ``torch._dynamo`` only to exclude the optimizer's methods from
compilation. That import takes as long as importing torch itself and would delay a server's start. Servers compile
nothing.
"""

from __future__ import annotations

import inspect

import torch

from lockstep.training.torch_private import compiler_is_loaded, keep_from_compiler

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def keep_compiler_out() -> None:
    """From now on, create optimizers in this process without importing the compiler.

    torch stores on each method what the compiler made of it: here that is the method itself. If another version of
    torch stores it elsewhere, the compiler is imported as usual.
    """
    if compiler_is_loaded():
        return
    for name in _METHODS:
        keep_from_compiler(inspect.unwrap(getattr(torch.optim.Optimizer, name)))


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` without the wrappers of torch's compiler and profiler; hooks are not called."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
