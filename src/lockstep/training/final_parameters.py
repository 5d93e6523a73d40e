"""The trained parameters as one safetensors file that plain torch can load."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

FILE_NAME = "final.safetensors"


def write_final_parameters(model: nn.Module, folder: str) -> Path:
    """Write ``model``'s state to ``folder``; the file appears whole or not at all."""
    target = Path(folder) / FILE_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    half = target.with_name(FILE_NAME + ".part")
    save_file(tensors, half)
    with half.open("rb") as written:
        os.fsync(written.fileno())
    half.replace(target)
    return target
