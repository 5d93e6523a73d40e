"""``--compile``: the model in compiled stages, so that gradients leave while backward goes on.

Compiled as a whole, a model has one backward function, and all gradients come out of it at its very end. So a chain of
modules is cut into stages that are compiled one by one: backward leaves them one after another, and the gradients of a
stage are on their way while the stages before it are computed. A stage holds at least half of the parameters that the
stages after it have left over: the last gradients of a backward pass, for which everybody waits, are then few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Backend = str | Callable[..., Any]
"""What torch.compile hands its graphs to."""

MOST_STAGES = 6
SMALL_REST = 1 / 32
"""A beginning of a chain with at most this share of its parameters is not cut any further."""

MOST_VARIANTS = 64
"""How often torch may compile one piece of Python: every stage is such a variant, and again for evaluation."""


Stage = list[nn.Module]
"""Modules that are compiled together."""


def compile_model(model: nn.Module, backend: Backend = "inductor", *, graphs: bool = False) -> list[Stage]:
    """Compile a model in place, its names unchanged, when it is called first; its stages, in the order of forward.

    A model that is no chain, such as those of other packages, is compiled as a whole. ``graphs``: on a GPU a stage's
    kernels are started by one call (CUDA graphs), which leaves the interpreter to the threads that move buckets. The
    gradients of a step must then not be kept until the next.
    """
    how: dict[str, Any] = {"dynamic": False, "backend": backend}
    if graphs and backend == "inductor":
        how["mode"] = "reduce-overhead"
    torch._dynamo.config.recompile_limit = max(MOST_VARIANTS, torch._dynamo.config.recompile_limit)
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
    """The chains that a model consists of: itself, or all its children with parameters; none where it is neither."""
    if isinstance(model, nn.Sequential):
        return [model]
    with_parameters = [child for child in model.children() if elements_of(child)]
    own = any(True for _ in model.parameters(recurse=False))
    if own or any(not isinstance(child, nn.Sequential) for child in with_parameters):
        return []
    return [child for child in with_parameters if isinstance(child, nn.Sequential)]


def elements_of(module: nn.Module) -> int:
    """How many numbers a module trains."""
    return sum(parameter.numel() for parameter in module.parameters())


def cut(sizes: Sequence[int]) -> list[slice]:
    """Where to cut a chain of modules with so many parameters each, from its first stage to its last."""
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

    # Code of its own. Torch counts how often it has compiled one piece of code, and gives up after some times without a
    # word; a task that begins another life in its process compiles again, and must compute the same bits.
    run.__code__ = run.__code__.replace(co_name="stage")
    compiled: Callable[[Tensor], Tensor] = torch.compile(run, **how)
    return compiled
