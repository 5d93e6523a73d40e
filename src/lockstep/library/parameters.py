"""Which parts of a model are trained, under which names, and what must be equal from the start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.library.errors import UsageError
from lockstep.library.optimizers import KnownOptimizer
from lockstep.protocol.core.messages import Setting
from lockstep.training.tensors import dtype_name
from lockstep.training.worker.binding import Trained

_COMPILED = "_orig_mod."
"""The prefix that torch.compile adds to names; one worker may compile while another does not."""


def named_tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of every parameter and buffer, in the model's order, shared ones once."""
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            yield "parameter", prefix + name.replace(_COMPILED, ""), parameter
        for name, buffer in model.named_buffers():
            yield "buffer", prefix + name.replace(_COMPILED, ""), buffer


def trained_parameters(models: Sequence[nn.Module], optimizers: Sequence[KnownOptimizer]) -> list[Trained]:
    """All parameters of all optimizers, in the model's order; parameters outside the model come last."""
    groups = _groups_of(optimizers)
    _refuse_another_models(models, optimizers)
    found: dict[int, Trained] = {}
    for kind, name, tensor in named_tensors(models):
        if kind == "parameter" and id(tensor) in groups and id(tensor) not in found:
            assert isinstance(tensor, nn.Parameter)
            found[id(tensor)] = Trained(name, tensor, groups[id(tensor)])
    for known in optimizers:
        for group in known.optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                if id(tensor) not in found:
                    name = f"(not in the model).{groups[id(tensor)]}.{index}"
                    found[id(tensor)] = Trained(name, tensor, groups[id(tensor)])
    for one in found.values():
        _check(one)
    if not found:
        raise UsageError("the optimizer has no parameters; give it those of the model that you wrap")
    return list(found.values())


class HasOptimizer(Protocol):
    """One of the program's optimizers, and perhaps what else is known about it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


@dataclass(frozen=True, slots=True)
class OwnOptimizer:
    """An optimizer that the program itself runs: nothing needs to be known about it."""

    optimizer: torch.optim.Optimizer


def own_optimizer(optimizer: object) -> OwnOptimizer:
    """UsageError if it is none of torch's kind: then nobody could tell when it makes a step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"job.wrap() takes an optimizer derived from torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    return OwnOptimizer(optimizer)


def averaged_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[OwnOptimizer]
) -> tuple[list[Trained], list[Trained]]:
    """Every parameter with a gradient, as DDP has it, in the model's order; those of the optimizers that are outside
    the model come last. And the frozen ones."""
    _refuse_another_models(models, optimizers)
    found: dict[int, Trained] = {}
    for kind, name, tensor in named_tensors(models):
        if kind == "parameter" and id(tensor) not in found:
            assert isinstance(tensor, nn.Parameter)
            found[id(tensor)] = Trained(name, tensor, 0)
    groups = [group for one in optimizers for group in one.optimizer.param_groups]
    for number, group in enumerate(groups):
        for index, tensor in enumerate(group["params"]):
            if id(tensor) not in found:
                found[id(tensor)] = Trained(f"(not in the model).{number}.{index}", tensor, 0)
    trained = [one for one in found.values() if one.parameter.requires_grad]
    for one in trained:
        _check(one)
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient; unfreeze some before job.wrap()")
    return trained, [one for one in found.values() if not one.parameter.requires_grad]


def _refuse_another_models(models: Sequence[nn.Module], optimizers: Sequence[HasOptimizer]) -> None:
    """UsageError if the optimizers would leave the whole model as it is: they were made for another one."""
    groups = [group for one in optimizers for group in one.optimizer.param_groups]
    theirs = {id(parameter) for group in groups for parameter in group["params"]}
    own = {id(tensor) for kind, _, tensor in named_tensors(models) if kind == "parameter" and tensor.requires_grad}
    if own and theirs and not own & theirs:
        raise UsageError(
            "no parameter of the optimizer is one of the model's, so the model would stay as it is; make the optimizer "
            "from the parameters of the model that you wrap, after the model has been made, moved and converted"
        )


def model_buffers(models: Sequence[nn.Module]) -> list[Tensor]:
    """Every buffer once, in the models' order."""
    found = {id(tensor): tensor for kind, _, tensor in named_tensors(models) if kind == "buffer"}
    return list(found.values())


def sparse_parameters(models: Sequence[nn.Module]) -> set[int]:
    """The ids of parameters whose gradients their layers make sparse."""
    parts = [part for model in models for part in model.modules() if getattr(part, "sparse", False) is True]
    return {id(p) for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag) for p in part.parameters()}


def synchronises_statistics(models: Sequence[nn.Module]) -> bool:
    """Whether a model has layers that talk to other workers through torch.distributed's own group."""
    return any(isinstance(part, nn.SyncBatchNorm) for model in models for part in model.modules())


def refuse_local_statistics(models: Sequence[nn.Module], workers: int) -> None:
    """With servers nobody but the program makes that group: UsageError if such layers would silently do without it."""
    if workers > 1 and synchronises_statistics(models) and not dist.is_initialized():
        raise UsageError(
            "SyncBatchNorm asks the other workers through torch.distributed, which a job with servers does not set up, "
            "so each worker would use the statistics of its own batches; use BatchNorm, or train on GPUs without "
            "servers (lockstep.join() without servers= and ps_hosts=)"
        )


def _groups_of(optimizers: Sequence[KnownOptimizer]) -> dict[int, int]:
    groups: dict[int, int] = {}
    for known in optimizers:
        for number, group in zip(known.groups, known.optimizer.param_groups, strict=True):
            for tensor in group["params"]:
                if id(tensor) in groups:
                    raise UsageError("a parameter belongs to two optimizers; give each parameter to only one of them")
                groups[id(tensor)] = number
    return groups


def _check(one: Trained) -> None:
    try:
        dtype_name(one.parameter.dtype)
    except KeyError:
        raise UsageError(
            f"parameter {one.name!r} has dtype {one.parameter.dtype}, which cannot be trained; convert it to float32, "
            "float64, float16 or bfloat16 before job.wrap()"
        ) from None
    if one.parameter.is_meta or isinstance(one.parameter, nn.UninitializedParameter):
        raise UsageError(f"parameter {one.name!r} has no values yet; run one batch through the model before job.wrap()")


def untrained_digests(models: Sequence[nn.Module], trained: Sequence[Trained]) -> tuple[Setting, ...]:
    """A digest of every tensor that no server changes; and which of the trained parameters are frozen.

    These may be unfrozen later, so their values are the chief's, and only that they are frozen is compared.
    """
    ours = {id(one.parameter) for one in trained}
    frozen = tuple(_frozen(one.name, "") for one in trained if not one.parameter.requires_grad)
    others = [one for one in named_tensors(models) if id(one[2]) not in ours]
    return (*frozen, *(Setting(f"{kind} {name!r}", _digest(tensor)) for kind, name, tensor in others))


def frozen_digests(frozen: Sequence[Trained]) -> tuple[Setting, ...]:
    """Digests of the parameters that nobody trains."""
    return tuple(_frozen(one.name, _digest(one.parameter)) for one in frozen)


def _frozen(name: str, value: str) -> Setting:
    return Setting(f"frozen parameter {name!r}", value)


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    shape = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.sha256(shape + raw).hexdigest()[:16]
