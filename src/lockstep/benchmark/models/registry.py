"""Finds a model by its name.

Torch is imported only when a model is built: finding a built-in model needs only the catalogue.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, cast

from lockstep.benchmark.models.catalogue import (
    IMAGENET,
    TOKENS,
    CatalogueEntry,
    find_entry,
    is_external,
)
from lockstep.benchmark.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def find_model(name: str, dataset: str = IMAGENET) -> ModelSpec:
    """The model of this name for this data set.

    Raises:
        UnknownModel: there is none; the text is one sentence that says what to use instead.
    """
    if is_external(name):
        from lockstep.benchmark.models.external import find_external

        return find_external(name)
    entry = find_entry(name, dataset)
    return ModelSpec(
        name=entry.name,
        image_size=entry.image_size,
        default_batch_size=entry.default_batch_size,
        default_learning_rate=entry.learning_rate,
        build=partial(_build_entry, entry),
        make_batch=_make_tokens if entry.dataset == TOKENS else None,
    )


def build_model(name: str, dataset: str, num_classes: int) -> nn.Module:
    """A fresh model; its weights come from torch's default generator."""
    return find_model(name, dataset).build(num_classes)


def load_code(name: str, dataset: str) -> None:
    """Import what building this model needs, ahead of time. Nothing of an external one: that is its author's code."""
    if not is_external(name):
        _module_of(find_entry(name, dataset))


def _module_of(entry: CatalogueEntry) -> ModuleType:
    return importlib.import_module(f"lockstep.benchmark.models.{entry.module}")


def _build_entry(entry: CatalogueEntry, num_classes: int) -> nn.Module:
    module = _module_of(entry)
    factory = cast("Callable[..., nn.Module]", getattr(module, entry.factory))
    return factory(num_classes, **dict(entry.arguments))


def _make_tokens(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    from lockstep.benchmark.models.seq2seq import make_batch

    return make_batch(count, generator)
