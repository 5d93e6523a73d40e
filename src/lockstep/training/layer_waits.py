"""Forward waits layer by layer: each layer waits only for the parameters it uses, while the rest still arrive.

A hook before each layer's forward waits for the layer's own parameters. That is correct only if no parameter is used
before a layer that owns it is called (attention, for example, reads the weights of a layer that it never calls).
So the first step, which waits for everything before it starts, watches every torch call: parameters that are used
before such a hook are awaited at the very beginning from then on. After forward, all parameters are awaited, used or
not. If a later step uses a parameter in another way, its gradient shows it, and the job ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lockstep.training.binding import Bound

Need = Callable[[Sequence[Bound]], None]
"""Blocks until the next values of these parameters are in the model."""


class LayerWaits:
    """The hooks on one model."""

    def __init__(self, model: nn.Module, bound: Sequence[Bound], need: Need, need_all: Callable[[], None]) -> None:
        """``need_all`` is called when forward has ended."""
        self._need = need
        self._need_all = need_all
        self._by_parameter = {id(one.trained.parameter): one for one in bound}
        self._early: dict[int, Bound] = {}
        """Parameters that are used before a layer that owns them is called."""
        self._passed: set[int] = set()
        """Parameters that have been awaited in this forward."""
        self._watching: contextlib.ExitStack | None = None
        self.learned = False
        self._learning = False
        """In the first step, from its forward to the end of its backward."""
        self._handles = self._hook(model)

    def begin(self) -> None:
        """A forward is about to begin."""
        self._passed.clear()
        self._learning = not self.learned

    def was_waited_for(self, bound: Bound) -> bool:
        """A parameter got a gradient: whether it had its new value before this forward used it."""
        if self._learning and bound.index not in self._passed:
            self._early[bound.index] = bound  # used where no torch call shows it
        return self._learning or bound.index in self._passed

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        # Before the root's own parameters, which it may have too.
        handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._on_begin)]
        for module in model.modules():
            own = [self._by_parameter[id(p)] for p in module.parameters(recurse=False) if id(p) in self._by_parameter]
            if own:
                handles.append(module.register_forward_pre_hook(self._hook_for(own)))
        handles.append(model.register_forward_hook(self._on_end, always_call=True))
        return handles

    def _hook_for(self, own: list[Bound]) -> Callable[[nn.Module, Any], None]:
        indices = [bound.index for bound in own]

        def hook(_module: nn.Module, _given: Any) -> None:
            self._passed.update(indices)
            self._need(own)

        return hook

    def _on_begin(self, _module: nn.Module, _given: Any) -> None:
        if not self.learned and self._watching is None:
            self._watching = contextlib.ExitStack()
            self._watching.enter_context(_Watch(self._on_use))
        elif self._early:
            self._passed.update(self._early)
            self._need(list(self._early.values()))

    def _on_end(self, _module: nn.Module, _given: Any, output: Any) -> None:
        if self._watching is not None:
            self._watching.close()
            self._watching = None
            self.learned = True
        if output is None:
            # Forward has failed, and torch raises its error. It would only print a warning about another one here; and
            # where a forward returns None, the next wait raises what is suppressed.
            with contextlib.suppress(Exception):
                self._need_all()
        else:
            self._need_all()

    def _on_use(self, used: Iterable[object]) -> None:
        for value in used:
            bound = self._by_parameter.get(id(value))
            if bound is not None and bound.index not in self._passed:
                self._early[bound.index] = bound


class _Watch(TorchFunctionMode):
    """Reports the tensors passed to every torch call."""

    def __init__(self, on_use: Callable[[Iterable[object]], None]) -> None:
        super().__init__()
        self._on_use = on_use

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        self._on_use(given)
        for one in given:
            if isinstance(one, list | tuple):
                self._on_use(one)
        return func(*args, **(kwargs or {}))
