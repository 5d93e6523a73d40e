"""The norm that ``job.clip_grad_norm_`` returns with servers: a number that may still be on its way.

It is an ordinary tensor without dimensions to everything that uses it; the first use waits for its value. A program
that never looks at it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.training.torch_private import DisableTorchFunctionSubclass, subclass_of, tree_map


class AwaitedNorm(Tensor):
    """The total norm of a step's mean gradient."""

    _find: Callable[[], float] | None
    _found: Tensor

    @staticmethod
    def on_its_way(find: Callable[[], float], like: Tensor) -> AwaitedNorm:
        """``find`` blocks until the value is known. ``like``: of its type, on its device."""
        blank = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
        made = subclass_of(AwaitedNorm, blank)
        assert isinstance(made, AwaitedNorm)
        made._find, made._found = find, blank
        return made

    def settle(self) -> Tensor:
        """The norm as a plain tensor; blocks until it is known."""
        if self._find is not None:
            self._found.fill_(self._find())
            self._find = None
        return self._found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            return func(*tree_map(_plain, tuple(args)), **tree_map(_plain, dict(kwargs or {})))


def _plain(value: Any) -> Any:
    return value.settle() if isinstance(value, AwaitedNorm) else value
