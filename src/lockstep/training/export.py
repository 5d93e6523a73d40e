"""Trained parameters as one safetensors file that plain torch can load: from a checkpoint, or from a model."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.foreign import read_json
from lockstep.protocol.core.plan import NO_PARAMETERS
from lockstep.runtime.checkpoint.folder import CheckpointError, Manifest, verify
from lockstep.training.server.shard_file import ShardFiles
from lockstep.training.tensors import torch_dtype
from lockstep.training.worker.local_state import DESCRIPTION

FINAL_NAME = "final.safetensors"


def export(checkpoint: Path, target: Path) -> int:
    """Write the parameters and buffers of a checkpoint to ``target``; returns the number of tensors.

    Raises CheckpointError if the checkpoint is damaged, and OSError if the file cannot be written.
    """
    manifest = verify(checkpoint)
    tensors = _parameters(checkpoint, manifest)
    try:
        shapes, buffers = _described(checkpoint, manifest)
        for name, shape in shapes.items():
            tensors[name] = tensors[name].reshape(shape)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of worker 0 in {checkpoint} does not describe the model: {error!r}"
        ) from error
    tensors.update(buffers)
    _write(tensors, target)
    return len(tensors)


def write_final_parameters(model: nn.Module, folder: str) -> Path:
    """Write the model's state to a file in ``folder``, which is created if it does not exist."""
    target = Path(folder) / FINAL_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    _write(tensors, target)
    return target


def _write(tensors: dict[str, Tensor], target: Path) -> None:
    """The file appears whole or not at all."""
    half = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        save_file(tensors, half)
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def _parameters(checkpoint: Path, manifest: Manifest) -> dict[str, Tensor]:
    try:
        files = ShardFiles(checkpoint, [shard.name for shard in manifest.shards])
        return {
            entry.name: files.value(entry.name, 0, entry.elements, torch_dtype(entry.dtype))
            for entry in manifest.parameters
            if entry.name not in NO_PARAMETERS
        }
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _described(checkpoint: Path, manifest: Manifest) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """The shapes of the parameters, and the chief's buffers; both empty if no state of the chief was saved."""
    chief = next((facts.name for facts in manifest.states if facts.name.startswith("worker-0.")), None)
    if chief is None:
        return {}, {}
    with safe_open(checkpoint / chief, framework="pt") as file:
        described: dict[str, Any] = read_json(file.metadata().get(DESCRIPTION, "{}"))
        flat = {key: file.get_tensor(key) for key in file.keys() if key.startswith("buffers/")}  # noqa: SIM118
    shapes = {str(name): [int(size) for size in shape] for name, shape in described.get("parameters", [])}
    buffers: dict[str, Tensor] = {}
    offsets: dict[str, int] = {}
    for name, shape, dtype, kept in described.get("buffers", []):
        elements, first = torch.Size(shape).numel(), offsets.get(dtype, 0)
        offsets[dtype] = first + elements
        if kept:
            buffers[name] = flat[f"buffers/{dtype}"][first : first + elements].reshape(shape).clone()
    return shapes, buffers
