"""What a job without servers writes to a checkpoint: parameters and optimizers, which are the same on every rank.

Rank 0 writes them, in the format of a server's shard: every parameter under its name, so that ``lockstep checkpoint
export`` finds it, and the state of the program's optimizers as text and tensors. A job that starts from it reads them
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.training.ranks.kept_versions import KeptVersions
from lockstep.training.server.shard_file import VALUE, PieceName, ShardFiles, named
from lockstep.training.worker.binding import Trained

OPTIMIZERS = "optimizers"
TEXT = "text"


class NoSuchState(ValueError):  # noqa: N818 - reads as the fact it states
    """The checkpoint does not have what this job needs; the text says what."""


class SaveSlot:
    """Where the store's thread finds what to save, once a model is wrapped."""

    def __init__(self) -> None:
        self.take: Callable[[], list[NamedTensor]] | None = None
        self.kept: KeptVersions | None = None
        """Where ranks come back: what says when nobody changes parameters."""

    def __call__(self, version: int) -> list[NamedTensor]:
        if self.take is None:
            raise ValueError(f"no model is wrapped whose version {version} could be saved")
        return self.take() if self.kept is None else self.kept.save(version, self.take)

    def expect(self, version: int) -> None:
        """It is about to be called for this version."""
        if self.kept is not None and self.take is not None:
            self.kept.expect_save(version)

    def answer(self, what: str, data: bytes) -> bytes:
        """What another rank asks for; empty: not now."""
        return b"" if self.kept is None else self.kept.answer(what, data)


def values_of(trained: Sequence[Trained]) -> list[NamedTensor]:
    """Copies of all parameters: they are written to disk while the next steps change them."""
    return [named(PieceName(VALUE, 0, "", one.name), one.parameter.detach().cpu().clone()) for one in trained]


def optimizers_as(text: str, tensors: dict[str, Tensor]) -> list[NamedTensor]:
    """The state of the optimizers: a text, and the tensors that it names."""
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [named(PieceName(OPTIMIZERS, 0, name, ""), tensor) for name, tensor in {**tensors, TEXT: raw}.items()]


def put_values(folder: Path, names: Sequence[str], trained: Sequence[Trained]) -> None:
    """Copy the parameters of these files into the model; NoSuchState if one is missing."""
    try:
        files = ShardFiles(folder, names)
        for one in trained:
            parameter = one.parameter
            value = files.value(one.name, 0, parameter.numel(), parameter.dtype)
            with torch.no_grad():
                parameter.copy_(value.view(parameter.shape))
    except ValueError as error:
        raise NoSuchState(str(error)) from None


def optimizers_in(folder: Path, names: Sequence[str]) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors that ``optimizers_as`` wrote; NoSuchState if they are not there."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no dictionary
                    piece = PieceName.parse(key)
                    if piece.kind == OPTIMIZERS:
                        tensors[piece.name] = file.get_tensor(key)
        except (SafetensorError, OSError, ValueError) as error:
            raise NoSuchState(f"{folder / name} cannot be read: {error}") from None
    text = tensors.pop(TEXT, None)
    if text is None:
        raise NoSuchState(f"{folder} has no state of optimizers: it was written by a job with servers")
    try:
        return text.view(torch.uint8).numpy().tobytes().decode(), tensors
    except (UnicodeError, RuntimeError):  # other bytes, or a tensor that has none
        raise NoSuchState(f"the state of the optimizers in {folder} is not a text") from None
