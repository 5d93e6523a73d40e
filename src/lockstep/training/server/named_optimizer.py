"""The optimizers that servers run: classes of torch.optim, by name, with plain numbers as settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lockstep.foreign import plain, read_json
from lockstep.protocol.core.messages import OptimizerEntry
from lockstep.training.server.bare_optimizer import keep_compiler_out, step

ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)
"""The classes of torch.optim that servers run: those that work element by element."""
FUSED_ON: Mapping[str, frozenset[str]] = MappingProxyType(
    {"cpu": frozenset(("SGD", "Adam", "AdamW", "Adagrad")), "cuda": frozenset(("SGD", "Adam", "AdamW"))}
)
"""Those that every supported torch can run in one pass over memory (``fused=True``), by type of device."""
_MAX_OPTIONS_BYTES = 64 << 10


def make_optimizer(entry: OptimizerEntry, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of a parameter group, over one flat tensor; ValueError for one that servers do not run.

    Its name comes from another task: no other function of torch.optim, or of a module in it, may be called by name.
    If ``fused`` is requested, but does not exist on the parameter's device, torch chooses the kernels.
    """
    if entry.kind not in ELEMENTWISE:
        raise ValueError(f"servers do not run {plain(entry.kind, 100)!r}, only {', '.join(sorted(ELEMENTWISE))}")
    options = optimizer_options(entry)
    if options.get("fused") and entry.kind not in FUSED_ON.get(parameter.device.type, frozenset()):
        options["fused"] = None
    try:
        made = getattr(torch.optim, entry.kind)([parameter], **options)
    except TypeError as error:  # a name that it does not have, or a number where it takes several
        raise ValueError(f"{entry.kind} does not take these settings: {plain(str(error), 200)}") from error
    assert isinstance(made, torch.optim.Optimizer)
    return made


def warm_up() -> None:
    """Import now what torch imports with its first optimizer; otherwise the first bucket would wait for it."""
    keep_compiler_out()
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.grad = torch.zeros(1)
    step(make_optimizer(OptimizerEntry("SGD", '{"lr": 0.0}'), parameter))


def optimizer_options(entry: OptimizerEntry) -> dict[str, object]:
    """The plain settings of a group as the class of torch.optim takes them; ValueError for any other."""
    options = read_json(entry.options, _MAX_OPTIONS_BYTES)
    if not isinstance(options, dict) or not all(map(_is_plain, options.values())):
        raise ValueError(f"the settings of {plain(entry.kind, 100)} are not plain numbers")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _is_plain(value: object) -> bool:
    """A number, or a few of them: nothing that an optimizer would take for a tensor, a name or a list of parameters."""
    if isinstance(value, list):
        return all(isinstance(one, int | float) for one in value)
    return value is None or isinstance(value, int | float)
