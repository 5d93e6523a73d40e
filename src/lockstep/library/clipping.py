"""Clipping the mean of all workers' gradients: what is asked for, and how a program that clips its own is noticed."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from lockstep.library.errors import UsageError
from lockstep.library.optimizers import KnownOptimizer
from lockstep.protocol.core.messages import Clip

NORM, VALUE = "job.clip_grad_norm_()", "job.clip_grad_value_()"


@dataclass(frozen=True, slots=True)
class PendingClip:
    """The next step of this optimizer is clipped."""

    clip: Clip
    known: KnownOptimizer

    @property
    def call(self) -> str:
        return NORM if self.clip.by_norm else VALUE


def norm_clip(max_norm: float, norm_type: float) -> Clip:
    """UsageError if such a norm cannot be had."""
    limit, kind = float(max_norm), float(norm_type)
    if math.isnan(limit) or limit < 0:
        raise UsageError(f"job.clip_grad_norm_({max_norm}) cannot be done; give a number that is not negative")
    if not kind >= 1:
        raise UsageError(f"job.clip_grad_norm_(norm_type={norm_type}) is not known; give 1, 2 or inf")
    return Clip(limit, kind)


def value_clip(value: float) -> Clip:
    limit = float(value)
    if math.isnan(limit) or limit < 0:
        raise UsageError(f"job.clip_grad_value_({value}) cannot be done; give a number that is not negative")
    return Clip(limit)


def refuse_infinite(norm: Tensor, norm_type: float) -> None:
    """As torch's ``error_if_nonfinite``."""
    if not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of order {float(norm_type)} of the mean gradient is {norm.item()}, so it cannot be clipped; "
            "with error_if_nonfinite=False it is scaled by this norm all the same"
        )


def parameters_of(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], chosen: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """What is clipped, in the order in which ``model.parameters()`` has it: the norm's bits depend on that."""
    whole = [parameter for model in models for parameter in model.parameters()]
    if chosen is None and len(optimizers) == 1:
        return list(dict.fromkeys(whole))
    ours = chosen_optimizer(optimizers, chosen)
    owned = {parameter for group in ours.param_groups for parameter in group["params"]}
    return [parameter for parameter in dict.fromkeys(whole) if parameter in owned]


def chosen_optimizer(
    optimizers: Sequence[torch.optim.Optimizer], chosen: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """The optimizer whose gradients are clipped."""
    if chosen is None and len(optimizers) > 1:
        raise UsageError(
            "this job has several optimizers, and each makes a step of its own; name the one whose gradients are "
            "clipped: job.clip_grad_norm_(1.0, optimizer=...)"
        )
    found = optimizers[0] if chosen is None else chosen
    if not any(one is found for one in optimizers):
        raise UsageError("the optimizer that was to be clipped was not wrapped; give one that job.wrap() returned")
    return found


# -- programs that clip with torch's own functions --

OWN_CLIPS: Final = frozenset({"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_"})
CLIPS_ITS_OWN: Final = (
    "this program clips each worker's gradients before the servers average them, where DDP would clip the mean: "
    "replace torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) by job.clip_grad_norm_(max_norm) "
    "(docs/library.md)"
)


def mentions_own_clip() -> bool:
    """Whether the program's code that is running, or other code of the same files, names one of torch's clips.

    Asked only if gradients were changed after backward: together this shows what changed them. However the function
    was imported, its name is in the code that calls it.
    """
    return any(_names(code) & OWN_CLIPS for frame in _program_frames() for code in _codes(frame))


def _program_frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_torch_or_ours(frame.f_globals.get("__name__", "")):
            yield frame
        frame = frame.f_back


def _is_torch_or_ours(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "lockstep")


def _codes(frame: types.FrameType) -> Iterator[types.CodeType]:
    yield frame.f_code
    file = Path(frame.f_code.co_filename)
    for value in list(frame.f_globals.values()):
        members = vars(value).values() if isinstance(value, type) else (value,)
        for one in members:
            if isinstance(one, types.FunctionType) and Path(one.__code__.co_filename) == file:
                yield one.__code__


def _names(code: types.CodeType) -> set[str]:
    """The names in a function and in those inside it."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)
