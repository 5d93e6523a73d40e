"""The benchmark's models: a catalogue that needs no torch, and one module per family that does."""

from __future__ import annotations

from lockstep.benchmark.models.catalogue import (
    LearningRate,
    UnknownModel,
    check_model_name,
    dataset_classes,
    model_names,
)
from lockstep.benchmark.models.registry import build_model, find_model
from lockstep.benchmark.models.spec import ModelSpec

__all__ = [
    "LearningRate",
    "ModelSpec",
    "UnknownModel",
    "build_model",
    "check_model_name",
    "dataset_classes",
    "find_model",
    "model_names",
]
