"""What workers bring to a call, as bytes and back; and what becomes of the values of all. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lockstep.foreign import JsonError, read_json
from lockstep.library.errors import UsageError
from lockstep.library.state_codec import from_text, to_text
from lockstep.protocol.core.calls import MOST_CALL_BYTES

OPERATIONS: Final = ("mean", "sum", "max", "min")
_TAKES: Final = "a call takes numbers, text, tensors, None, or lists, tuples and dictionaries of these"
_PLAIN: Final = b"J"
_WITH_TENSORS: Final = b"T"
_TEXT: Final = "text"
_NARROW: Final = 4
"""Floating-point numbers of fewer bytes are added up in 32 bits and rounded once."""


def packed(value: object) -> bytes:
    """UsageError if there is something in it that is neither plain data nor a tensor."""
    tensors: dict[str, Tensor] = {}
    text = to_text(_checked(value), tensors, _TAKES)
    if not tensors:
        return _PLAIN + text.encode()
    forms = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in tensors.items()}
    head = json.dumps({"text": text, "forms": forms}).encode()
    flat = {name: one.reshape(-1).view(torch.uint8) for name, one in tensors.items()}
    return _WITH_TENSORS + save({**flat, _TEXT: torch.frombuffer(bytearray(head), dtype=torch.uint8)})


def unpacked(data: bytes) -> Any:
    """The value that ``packed`` made these bytes of; ValueError for anything else. Its tensors are on the CPU."""
    if data[:1] == _PLAIN:
        return from_text(data[1:].decode(), {})
    try:
        flat = load(data[1:])
        head = read_json(flat.pop(_TEXT).numpy().tobytes(), 2 * MOST_CALL_BYTES)
        tensors = {name: _shaped(flat[name], *form) for name, form in cast("dict[str, Any]", head)["forms"].items()}
        return from_text(cast("dict[str, Any]", head)["text"], tensors)
    except (SafetensorError, JsonError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"this is not what a worker brings to a call: {error!r}") from error


def _shaped(flat: Tensor, name: str, shape: list[int]) -> Tensor:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return flat.clone().view(dtype).reshape(shape)


def _checked(value: object) -> object:
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_quantized):
        raise UsageError(f"a call takes dense tensors; this one is {value.layout}: convert it with to_dense()")
    return value


# -- all_reduce --


def form_of(value: object, op: str) -> str:
    """What the values of all workers must have in common. UsageError if they cannot be reduced."""
    if op not in OPERATIONS:
        raise UsageError(f"job.all_reduce(op={op!r}) is not known; use one of: {', '.join(OPERATIONS)}")
    if isinstance(value, Tensor):
        if value.is_complex() and op in ("max", "min"):
            raise UsageError(
                f"job.all_reduce(op={op!r}) was given complex numbers, which have no order; use mean or sum"
            )
        return f"{op} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, bool | int | float):
        return f"{op} of a number"
    raise UsageError(
        f"job.all_reduce() takes a number or a tensor, not {type(value).__name__}; "
        "use float(...), or job.gather() for other data"
    )


def reduced(values: Sequence[Any], op: str) -> Any:
    """The values of all workers, in their order, made one."""
    return _reduced_tensors(values, op) if isinstance(values[0], Tensor) else _reduced_numbers(values, op)


def _reduced_numbers(values: Sequence[float], op: str) -> float:
    if op in ("max", "min"):
        lost = next((value for value in values if math.isnan(value)), None)
        if lost is not None:
            return lost
        return max(values) if op == "max" else min(values)
    total = values[0] + 0
    for value in values[1:]:
        total = total + value
    return total if op == "sum" else total / len(values)


def _reduced_tensors(values: Sequence[Tensor], op: str) -> Tensor:
    if op in ("max", "min"):
        return _extreme(values, torch.maximum if op == "max" else torch.minimum)
    dtype = values[0].dtype
    total = values[0].to(_wide(dtype), copy=True)
    for value in values[1:]:
        total += value.to(total.dtype)
    if op == "mean":
        total = total / len(values)
    return total.to(dtype) if dtype.is_floating_point else total


def _extreme(values: Sequence[Tensor], larger: Any) -> Tensor:
    dtype, found = values[0].dtype, values[0]
    if dtype.is_floating_point and dtype.itemsize < _NARROW:
        found = found.float()  # exact; not every narrow type can be compared
    for value in values[1:]:
        found = larger(found, value.to(found.dtype))
    return found.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Truth values are counted."""
    if dtype is torch.bool:
        return torch.int64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < _NARROW else dtype
