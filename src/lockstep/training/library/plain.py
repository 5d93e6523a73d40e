"""What objects of a program (schedulers, scalers) know, as text and tensors, and back. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.training.library.errors import UsageError


class Stateful(Protocol):
    """What schedulers and gradient scalers of torch are, and what an object of one's own can be."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def to_text(value: object, tensors: dict[str, Tensor]) -> str:
    """JSON of this value; the tensors in it are added to ``tensors``."""
    return json.dumps(_tagged(value, tensors))


def from_text(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was written so."""
    return _untagged(json.loads(text), tensors)


def _tagged(value: object, tensors: dict[str, Tensor]) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = f"kept/{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, list):
        return [_tagged(one, tensors) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(one, tensors) for one in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_tagged(key, tensors), _tagged(one, tensors)] for key, one in value.items()]}
    raise UsageError(
        "job.keep() takes objects whose state_dict() holds numbers, text, tensors, lists and dictionaries of them, and "
        f"found {type(value).__name__} there; leave it out of state_dict()"
    )


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
    """Put the numbers of a parameter group back; a rate that is a tensor stays the same tensor."""
    for name, value in saved.items():
        former = group.get(name)
        if isinstance(former, Tensor):
            with torch.no_grad():
                former.copy_(torch.as_tensor(value))
        else:
            group[name] = value
