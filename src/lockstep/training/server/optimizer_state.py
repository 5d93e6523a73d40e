"""The state of a flat bucket's optimizer, parameter by parameter.

One optimizer works on a whole bucket as long as all its parameters are updated together. If some of them get no
gradient in a step, those must keep their state (and their own count of steps), so the bucket is split: from then on
each parameter has its own optimizer. Both are read and written here in one form: one dictionary per piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

PieceState = dict[str, Tensor]


def take_apart(state: Mapping[str, object], elements: int, ranges: Sequence[slice]) -> list[PieceState]:
    """A flat bucket's state as states of its pieces: entries per element are cut, the rest is copied."""
    pieces: list[PieceState] = []
    for where in ranges:
        piece: PieceState = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            piece[name] = (value[where] if value.numel() == elements and value.dim() else value).clone()
        pieces.append(piece)
    return pieces


def put_together(pieces: Sequence[PieceState], elements: int, ranges: Sequence[slice]) -> PieceState | None:
    """The reverse; None if the pieces' counts differ, so that they cannot share an optimizer."""
    first = pieces[0]
    if any(piece.keys() != first.keys() for piece in pieces):
        return None
    whole: PieceState = {}
    for name, value in first.items():
        if not value.dim():
            if any(not torch.equal(piece[name], value) for piece in pieces):
                return None
            whole[name] = value.clone()
            continue
        flat = torch.zeros(elements, dtype=value.dtype, device=value.device)
        for piece, where in zip(pieces, ranges, strict=True):
            flat[where] = piece[name].reshape(-1)
        whole[name] = flat
    return whole


def pack(pieces: Sequence[PieceState]) -> bytes:
    """The states of a bucket's pieces as safetensors: ``2/exp_avg`` belongs to piece 2."""
    return save(
        {
            f"{index}/{name}": value.detach().cpu().contiguous()
            for index, piece in enumerate(pieces)
            for name, value in piece.items()
        }
    )


def unpack(data: bytes, count: int) -> list[PieceState]:
    """``pack`` read back; ValueError for anything else, and for a piece that the bucket does not have."""
    pieces: list[PieceState] = [{} for _ in range(count)]
    try:
        loaded = load(data)
    except SafetensorError as error:
        raise ValueError(f"this is not the state of an optimizer: {error}") from error
    for key, value in loaded.items():
        index, _, name = key.partition("/")
        if not index.isdigit() or int(index) >= count:
            raise ValueError(f"the state names piece {index!r} of a bucket that has only {count} pieces")
        pieces[int(index)][name] = value
    return pieces
