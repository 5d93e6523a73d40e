"""The state of a program's objects (schedulers, scalers) as text and tensors, and back. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lockstep.foreign import read_json
from lockstep.library.errors import UsageError

_MAX_BYTES: Final = 64 << 20
_MAX_VALUES: Final = 1 << 24
"""A program may keep the order of all its samples."""
_MAX_DEPTH: Final = 256
"""Each list or dictionary of the program takes two or three here."""


class Stateful(Protocol):
    """The interface of torch's schedulers and gradient scalers, which your own objects can provide too."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


_KEEPS: Final = (
    "job.keep() takes objects whose state_dict() holds numbers, text, tensors, or lists and dictionaries of these"
)


def to_text(value: object, tensors: dict[str, Tensor], takes: str = _KEEPS) -> str:
    """This value as JSON; its tensors are added to ``tensors``. ``takes``: what a refusal says is possible."""
    return json.dumps(_tagged(value, tensors, takes))


def from_text(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value that ``to_text`` wrote; ValueError for anything else."""
    found = read_json(text, _MAX_BYTES, depth=_MAX_DEPTH, values=_MAX_VALUES, any_number=True)
    try:
        return _untagged(found, tensors)
    except (TypeError, KeyError) as error:
        raise ValueError(f"this is not the state of a program: {error!r}") from error


def _tagged(value: object, tensors: dict[str, Tensor], takes: str) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = f"kept/{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, list):
        return [_tagged(one, tensors, takes) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(one, tensors, takes) for one in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_tagged(key, tensors, takes), _tagged(one, tensors, takes)] for key, one in value.items()]}
    raise UsageError(f"{takes}; it found {type(value).__name__}, which must be left out")


def _untagged(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_untagged(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner].clone()
    if kind == "tuple":
        return tuple(_untagged(one, tensors) for one in inner)
    pairs = {_untagged(key, tensors): _untagged(one, tensors) for key, one in inner}
    return Counter(pairs) if kind == "counter" else pairs


def set_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the numbers of a parameter group; a rate that is a tensor stays the same tensor."""
    for name, value in saved.items():
        former = group.get(name)
        if isinstance(former, Tensor):
            with torch.no_grad():
                former.copy_(torch.as_tensor(value))
        else:
            group[name] = value
