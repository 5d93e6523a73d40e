"""Conversions between bytes and tensors."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import ELEMENT_BYTES, Plan

_DTYPES: tuple[tuple[str, torch.dtype], ...] = (
    ("float32", torch.float32),
    ("float64", torch.float64),
    ("float16", torch.float16),
    ("bfloat16", torch.bfloat16),
)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that the plan calls ``name``; KeyError for any other."""
    return dict(_DTYPES)[name]


def dtype_name(dtype: torch.dtype) -> str:
    """What the plan calls this dtype; KeyError for one that is not trained."""
    return {value: name for name, value in _DTYPES}[dtype]


def as_tensor(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    """The bytes as a flat tensor, without a copy."""
    if not buffer.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype)


def _be_told_of_read_only_buffers() -> None:
    """torch warns once that it does not support read-only tensors. That is fine here: loans are only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.frombuffer(b"0", dtype=torch.uint8)


_be_told_of_read_only_buffers()


def entry_of(name: str, tensor: Tensor, group: int) -> ParameterEntry:
    """This parameter as the plan describes it."""
    return ParameterEntry(name, tensor.numel(), dtype_name(tensor.dtype), group)


def parameter_offsets(plan: Plan) -> list[int]:
    """Where each parameter begins in the arena. Its pieces are contiguous, so this and its size are enough."""
    offsets = [-1] * len(plan.parameters)
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            if piece.first == 0:
                offsets[piece.parameter] = bucket.arena_offset + piece.offset
    return offsets


def parameter_view(arena: Tensor, offset: int, like: Tensor) -> Tensor:
    """The range of a byte arena that holds one parameter, in its shape.

    Elements are sent in the order of ``contiguous_format``, so that tasks may use different formats.
    """
    nbytes = like.numel() * ELEMENT_BYTES[dtype_name(like.dtype)]
    flat = arena[offset : offset + nbytes].view(like.dtype)
    if like.is_contiguous():
        # The same strides, even where a dimension of size 1 allows others: compiled code requires those it saw first.
        return flat.as_strided(like.shape, like.stride())
    return flat.view(like.shape)


def is_in(gradient: Tensor | None, place: Tensor) -> bool:
    """Whether this gradient uses exactly that memory; it may be another object, or the same one moved away."""
    if gradient is None or (gradient.layout, gradient.dtype, gradient.device) != (
        place.layout,
        place.dtype,
        place.device,
    ):
        return False
    return gradient.is_set_to(place)
