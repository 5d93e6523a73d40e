"""A model in training can be copied and saved, and what comes out is an ordinary model: nothing of ours is in it.

``copy.deepcopy``, pickle and ``torch.save`` ask a module what it consists of (``__reduce_ex__``), and would find our
hooks, which hold a running job. So each module in training answers for itself, without them; and so does each parameter
that lies in memory shared with others, of which pickle would save all, once for each parameter.

Classes that copy themselves in a way of their own may still take a hook along. Then it becomes one that does nothing
and comes from Python's own library: whoever reads the file need not have Lockstep.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

_ANSWER = "__reduce_ex__"


class OwnHook:
    """A hook of ours on a module; it returns nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class CopyAnswers:
    """What these modules and parameters answer when they are copied or saved, until it is closed."""

    def __init__(self, models: Iterable[nn.Module], shared: Sequence[nn.Parameter] = ()) -> None:
        """``shared``: parameters that lie in common memory."""
        modules = dict.fromkeys(part for model in models for part in model.modules())
        self._answering: list[nn.Module | nn.Parameter] = []
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                self._let_answer(module, _module_without_hooks)
        for parameter in shared:
            if type(parameter) is nn.Parameter:
                self._let_answer(parameter, _parameter_by_itself)

    def _let_answer(self, one: Any, how: Callable[[Any, int], Any]) -> None:
        if _ANSWER in vars(one):  # a program's own answer
            return
        known = weakref.ref(one)
        vars(one)[_ANSWER] = lambda protocol: how(known(), protocol)
        self._answering.append(one)

    def close(self) -> None:
        """From now on they are copied as they are."""
        for one in self._answering:
            vars(one).pop(_ANSWER, None)
        self._answering.clear()


def _module_without_hooks(module: nn.Module, protocol: int) -> Any:
    found = type(module).__reduce_ex__(module, protocol)
    if isinstance(found, str) or len(found) <= 2 or not isinstance(found[2], dict):
        return found
    state = {name: _without_ours(value) for name, value in found[2].items() if name != _ANSWER}
    return (*found[:2], state, *found[3:])


def _without_ours(value: Any) -> Any:
    """A module's table of hooks without ours; anything else as it is."""
    if not isinstance(value, dict) or not any(isinstance(one, OwnHook) for one in value.values()):
        return value
    return type(value)((key, one) for key, one in value.items() if not isinstance(one, OwnHook))


def _parameter_by_itself(parameter: nn.Parameter, protocol: int) -> Any:
    alone = nn.Parameter(parameter.data.clone(), parameter.requires_grad)
    vars(alone).update((name, value) for name, value in vars(parameter).items() if name != _ANSWER)
    return alone.__reduce_ex__(protocol)
