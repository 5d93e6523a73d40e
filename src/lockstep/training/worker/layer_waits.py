"""Whatever uses a parameter waits for that parameter only, while the rest of the version still arrives.

Two things notice a use. A hook before each layer's forward waits for the layer's own parameters. And while anything is
awaited, every call of torch is watched: a call that is given a parameter, or a tensor in a parameter's memory, waits
for it. So it does not matter where a program uses its parameters (attention reads the weights of a layer that it never
calls; a moving average and ``state_dict()`` read all of them after the step), and nothing has to be learned.

Compiled code is not watched: once torch has compiled anything in this process, each version is awaited as a whole. So
it is before a CUDA graph is replayed.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.copies import OwnHook
from lockstep.training.gpu.graph_replays import call_before_replays, stop_calling
from lockstep.training.torch_private import (
    all_modes_taken_off,
    attributes_of_tensors,
    compiler_callbacks,
    default_device_mode,
    has_compiled,
    put_modes_on,
)
from lockstep.training.worker.binding import Bound

Need = Callable[[Sequence[Bound]], None]
"""Blocks until the next values of these parameters are in the model; asked once for each of them and each version."""

_READ_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
_READ_NONE = ("numel", "nelement", "dim", "size", "stride", "element_size", "is_contiguous", "requires_grad_")
_LISTS = (list, tuple)
_SHORT = 64
"""Lists of at most so many values are searched for tensors, longer ones only if they begin with one."""


class LayerWaits:
    """The hooks on a worker's models, and the watch over its thread."""

    def __init__(
        self, models: Sequence[nn.Module], bound: Sequence[Bound], need: Need, need_all: Callable[[], object]
    ) -> None:
        self._need = need
        self._need_all = need_all
        self._process = os.getpid()
        self._by_parameter = {id(one.trained.parameter): one for one in bound}
        self._in_memory = sorted((one for one in bound if one.local.numel()), key=lambda one: one.local.data_ptr())
        self._begins = [one.local.data_ptr() for one in self._in_memory]
        self._ends = [_end(one.local) for one in self._in_memory]
        self._awaiting = False
        self._missing: set[int] = set()
        """Parameters that nothing has waited for since this version is awaited."""
        self._one_waits = threading.RLock()
        self._busy = False
        """The thread that has the lock is carrying out a wait, which touches parameters too."""
        self._watch = _Watch(self._on_call)
        modules = [module for model in models for module in model.modules()]
        self._scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
        self._handles = [handle for module in modules for handle in self._hook(module)]
        self._on_gpu = any(one.local.is_cuda for one in bound)
        if self._on_gpu:
            call_before_replays(self._on_unwatched)
        self._compiler: Any = None
        """The part of torch's compiler that tells when it begins, once it is loaded."""
        _call_before_fork(self)

    def begin(self) -> bool:
        """A version is awaited: watch for uses, if all of them would be noticed."""
        if self._scripted or has_compiled():
            return False
        self._notice_compiler()
        self._missing.update(one.index for one in self._by_parameter.values())
        self._awaiting = True
        self._watch.enter()
        return True

    def end(self) -> None:
        """Everything is here."""
        self._awaiting = False
        self._missing.clear()
        self._watch.leave()

    def close(self) -> None:
        self.end()
        self._watch.forget()
        for handle in self._handles:
            handle.remove()
        if self._compiler is not None:
            self._compiler.remove_start_callback(self._on_unwatched)
        if self._on_gpu:
            stop_calling(self._on_unwatched)

    # -- uses: every call of torch passes here while anything is awaited, so what is here already must cost little --

    def _hook(self, module: nn.Module) -> list[RemovableHandle]:
        own = [self._by_parameter[id(p)] for p in module.parameters(recurse=False) if id(p) in self._by_parameter]
        if not own:
            return []
        indices = frozenset(one.index for one in own)

        def before(*_: object) -> None:
            if not (self._awaiting and self._missing.isdisjoint(indices)):
                self._on_use(own)

        return [module.register_forward_pre_hook(OwnHook(before))]

    def _on_call(self, func: Callable[..., Any], given: Iterable[object]) -> None:
        if not self._missing:
            return
        used = [one for value in _tensors(given) for one in self._used_by(value) if one.index in self._missing]
        if used and func not in _HARMLESS:
            self._on_use(used)

    def _used_by(self, value: Tensor) -> Iterable[Bound]:
        """The parameter that this tensor is, or in whose memory it is; all of them, if it may be any."""
        bound = self._by_parameter.get(id(value))
        if bound is not None:
            return (bound,)
        try:
            address = value.data_ptr()
        except RuntimeError:  # of torch.func, for example: it has no memory, and may stand for a parameter
            return self._by_parameter.values()
        place = bisect.bisect_right(self._begins, address) - 1
        if place < 0 or address >= self._ends[place]:
            return ()
        return (self._in_memory[place],) if _end(value) <= self._ends[place] else self._by_parameter.values()

    def _on_use(self, used: Sequence[Bound]) -> None:
        if not self._awaiting:
            self._watch.leave()
        # A forked child had all of them before it began (``before_fork``).
        if not self._awaiting or os.getpid() != self._process:
            return
        with self._one_waits:
            missing = [one for one in used if one.index in self._missing]
            if self._busy or not missing:
                return
            self._busy = True
            try:
                self._need(missing)
                self._missing.difference_update(one.index for one in missing)
                if self._awaiting and not self._missing:
                    self._need_all()  # nothing will use a parameter for the first time and find that all are here
            finally:
                self._busy = False

    def before_fork(self) -> None:
        """A child process has none of the threads that bring the parameters: it gets all of them now."""
        if not self._awaiting or os.getpid() != self._process:
            return
        with self._one_waits, contextlib.suppress(JobEndedError):  # the training thread will meet that itself
            if not self._busy:
                self._need_all()

    # -- code that cannot be watched --

    def _notice_compiler(self) -> None:
        if self._compiler is None and (known := compiler_callbacks()) is not None:
            self._compiler = known
            self._compiler.register_start_callback(self._on_unwatched)

    def _on_unwatched(self, *_: object) -> None:
        if self._awaiting:
            self._need_all()


class _Watch(TorchFunctionMode):
    """Reports every call of torch in this thread, from ``enter`` to ``leave``."""

    def __init__(self, on_call: Callable[[Callable[..., Any], Iterable[object]], None]) -> None:
        super().__init__()
        self._on_call = on_call
        self._is_on = False

    def enter(self) -> None:
        """Below the modes that the program has entered: each of those takes the topmost one away when it is left."""
        if self._is_on:
            return
        self._is_on = True
        modes = all_modes_taken_off()
        # torch expects the one of its default device at the very bottom.
        modes.insert(1 if modes and modes[0] is default_device_mode() else 0, self)
        put_modes_on(modes)

    def leave(self) -> None:
        """Not while torch is in a call that this reports, because it puts the mode back afterwards: then it stays."""
        if not self._is_on:
            return
        modes = all_modes_taken_off()
        self._is_on = self not in modes
        put_modes_on([mode for mode in modes if mode is not self])

    def forget(self) -> None:
        """Report nothing any more, and keep nobody alive."""
        self._on_call = _ignore

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._on_call(func, args)
        if not kwargs:
            return func(*args)
        self._on_call(func, kwargs.values())
        return func(*args, **kwargs)


def _ignore(_func: Callable[..., Any], _given: Iterable[object]) -> None:
    pass


def _tensors(given: Iterable[object]) -> Iterator[Tensor]:
    for value in given:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _LISTS) and (len(value) <= _SHORT or isinstance(value[0], Tensor | list | tuple)):
            yield from _tensors(value)


def _end(tensor: Tensor) -> int:
    """The address after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _call_before_fork(waits: LayerWaits) -> None:
    """For as long as they exist; Python keeps such functions forever."""
    known = weakref.ref(waits)

    def before() -> None:
        if (living := known()) is not None:
            living.before_fork()

    os.register_at_fork(before=before)


def _harmless() -> frozenset[Callable[..., Any]]:
    """What may be called with a parameter whose values are not here yet."""
    attributes = attributes_of_tensors()
    getters = [one.__get__ for name, one in attributes.items() if name not in _READ_VALUES]
    return frozenset([*getters, attributes["grad"].__set__, *(getattr(Tensor, name) for name in _READ_NONE)])


_HARMLESS = _harmless()
