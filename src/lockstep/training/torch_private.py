"""Every private name of torch that Lockstep uses, and nothing else: what may break with a new version of torch.

Each has a reason to be used all the same, and a test that says what is expected of it
(``tests/training/test_torch_private.py``). The rest of the code takes them from here; the same test looks for private
names of torch elsewhere. The format of the flight recorder, which is data, is read in ``flight/reading.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import GetSetDescriptorType
from typing import Any, Final

import torch
import torch._C._distributed_c10d as c10d  # torch.distributed has its stores too, but does not declare them
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_map

__all__ = [
    "BatchNorm",
    "DisableTorchFunctionSubclass",
    "all_modes_taken_off",
    "allow_variants",
    "at_end_of_backward",
    "attributes_of_tensors",
    "c10d",
    "changes_of",
    "compiler_callbacks",
    "compiler_is_loaded",
    "current_autograd_node",
    "default_device_mode",
    "foreach_add_",
    "foreach_copy_",
    "foreach_norm",
    "fused_adam_",
    "fused_adamw_",
    "gloo_options",
    "has_compiled",
    "has_gradient_hooks",
    "keep_from_compiler",
    "mark_as_stepped",
    "mark_as_wrapped_by_scheduler",
    "onednn_product",
    "put_modes_on",
    "rewrap_step",
    "subclass_of",
    "tree_map",
]

# -- kernels for lists of tensors: one call instead of one per tensor --

foreach_norm = torch._foreach_norm
foreach_copy_ = torch._foreach_copy_
foreach_add_ = torch._foreach_add_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_


def onednn_product(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What ``functional.linear`` computes, by oneDNN; torch's compiler uses it."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(given, weight, bias, "none", [], "")
    return made


BatchNorm = nn.modules.batchnorm._BatchNorm
"""The class that all kinds of batch norm share."""


# -- tensors --


def subclass_of(kind: type[Tensor], of: Tensor) -> Tensor:
    """The same memory as a tensor of this class, as torch makes its own subclasses."""
    made: Tensor = Tensor._make_subclass(kind, of)
    return made


def changes_of(tensor: Tensor) -> int:
    """How often this tensor was written in place, as autograd counts it."""
    return int(tensor._version)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether autograd would call somebody with the gradient of this parameter."""
    return bool(parameter._backward_hooks)


def attributes_of_tensors() -> dict[str, GetSetDescriptorType]:
    """What every tensor has as an attribute that torch computes: shape, grad, data and others."""
    return {name: one for name, one in vars(torch._C.TensorBase).items() if isinstance(one, GetSetDescriptorType)}


# -- backward --


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Called once the graph that is being walked through has been; only inside backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def current_autograd_node() -> Any:
    """What autograd is computing in this thread; None outside of backward, whatever torch's stub says."""
    return torch._C._current_autograd_node()


# -- modes that see every call of torch in a thread --


def all_modes_taken_off() -> list[TorchFunctionMode]:
    """The modes of this thread, the lowest first."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]


def put_modes_on(modes: list[TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)


def default_device_mode() -> object:
    """The mode of ``torch.set_default_device`` in this thread, which torch expects at the very bottom; or None."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


# -- optimizers and schedulers --


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler looks for a first step before its own."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_as_wrapped_by_scheduler(step: Callable[..., Any]) -> None:
    """A scheduler need not wrap this ``step`` to see whether it is called."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def rewrap_step(optimizer: torch.optim.Optimizer) -> None:
    """Give the ``step`` of an optimizer, whose class has changed, the wrapper for hooks and the profiler."""
    optimizer._patch_step_function()


# -- the compiler --


def compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Now, rather than with the first model that is compiled."""
    importlib.import_module("torch._dynamo")


def keep_from_compiler(method: Any) -> None:
    """torch stores on each method what its compiler made of it, and does not ask the compiler again: the method."""
    method.__dynamo_disable = method


def has_compiled() -> bool:
    """Whether torch has compiled anything in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is not None and bool(compiler.counters.get("frames"))


def compiler_callbacks() -> Any:
    """Where to register for the beginning of every compilation; None while nobody has loaded the compiler."""
    known = sys.modules.get("torch._dynamo.callback")
    return None if known is None else known.callback_handler


def allow_variants(count: int) -> None:
    """Let torch compile at least so many variants of one piece of code before it gives up."""
    torch._dynamo.config.recompile_limit = max(count, torch._dynamo.config.recompile_limit)


# -- torch.distributed --


GLOO_THREADS: Final = 2
"""Which carry out what is reduced at a time; torch's own choice for a group of one device."""


def gloo_options(devices: Sequence[object], patience: timedelta) -> Any:
    """For a group over gloo that takes turns between its devices: each has connections and a thread of its own."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._devices = list(devices)
    options._threads = GLOO_THREADS * len(devices)
    options._timeout = patience
    return options
