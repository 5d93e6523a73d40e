"""``--compile``: the model in compiled stages, so that gradients are sent while backward continues.

Compiled as a whole, a model has one backward function, which returns all gradients at its very end. So a chain of
modules is cut into stages that are compiled separately: backward passes through them one after another, and the
gradients of a stage are sent while the stages before it are computed. A stage holds at least half of the parameters
that the stages after it have left over, so the last gradients of a backward pass, for which everyone waits, are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.training.torch_private import allow_variants

Backend = str | Callable[..., Any]
"""What torch.compile passes its graphs to."""

MOST_STAGES = 6
SMALL_REST = 1 / 32
"""The start of a chain with at most this fraction of its parameters is not cut any further."""

MOST_VARIANTS = 64
"""How often torch may compile one piece of Python: once per stage, and again for evaluation."""


Stage = list[nn.Module]
"""Modules that are compiled together."""


def compile_model(model: nn.Module, backend: Backend = "inductor", *, graphs: bool = False) -> list[Stage]:
    """Compile a model in place on its first call, keeping its names; returns its stages, in the order of forward.

    A model that is not a chain, such as those of other packages, is compiled as a whole. ``graphs``: on a GPU one call
    launches all kernels of a stage (CUDA graphs), which frees the interpreter for the threads that move buckets. The
    gradients of a step must then not be kept until the next.
    """
    how: dict[str, Any] = {"dynamic": False, "backend": backend}
    if graphs and backend == "inductor":
        how["mode"] = "reduce-overhead"
    allow_variants(MOST_VARIANTS)
    chains = chains_of(model)
    if not chains:
        model.compile(**how)
        return [[model]]
    stages: list[Stage] = []
    for chain in chains:
        modules = list(chain)
        parts = [modules[where] for where in cut([elements_of(module) for module in modules])]
        chain.forward = _in_stages(parts, how)  # type: ignore[method-assign]  # an attribute of the instance
        stages += parts
    return stages


def chains_of(model: nn.Module) -> list[nn.Sequential]:
    """The chains that a model consists of: itself, or all its children with parameters; none if neither is a chain."""
    if isinstance(model, nn.Sequential):
        return [model]
    with_parameters = [child for child in model.children() if elements_of(child)]
    own = any(True for _ in model.parameters(recurse=False))
    if own or any(not isinstance(child, nn.Sequential) for child in with_parameters):
        return []
    return [child for child in with_parameters if isinstance(child, nn.Sequential)]


def elements_of(module: nn.Module) -> int:
    """The number of trainable elements of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def cut(sizes: Sequence[int]) -> list[slice]:
    """Where to cut a chain of modules, given the parameters of each, from its first stage to its last."""
    total = left = sum(sizes)
    stages: list[slice] = []
    end = len(sizes)
    while end and len(stages) < MOST_STAGES - 1 and left > total * SMALL_REST:
        begin, held = end, 0
        while begin and 2 * held < left:
            begin -= 1
            held += sizes[begin]
        stages.append(slice(begin, end))
        end, left = begin, left - held
    if end:
        stages.append(slice(0, end))
    return stages[::-1]


def _in_stages(parts: Sequence[Sequence[nn.Module]], how: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    stages = [_stage(part, how) for part in parts]

    def forward(given: Tensor) -> Tensor:
        for stage in stages:
            given = stage(given)
        return given

    return forward


def _stage(modules: Sequence[nn.Module], how: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    def run(given: Tensor) -> Tensor:
        for module in modules:
            given = module(given)
        return given

    # A separate code object. Torch counts how often it has compiled each one, and silently gives up after a while; a
    # task that begins another incarnation in its process compiles again, and must compute the same bits.
    run.__code__ = run.__code__.replace(co_name="stage")
    compiled: Callable[[Tensor], Tensor] = torch.compile(run, **how)
    return compiled
