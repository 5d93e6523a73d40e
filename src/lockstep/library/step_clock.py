"""Times the parts of a step of any program, in the same way in every shape of a comparison.

Hooks on the model, on its parameters and on the optimizer note when each part begins and ends. On a GPU these are
events in its own stream, so nothing waits for them while the program runs. Only a comparison uses this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.runtime.compared import ComparedRun, StepParts, write_parts

Mark = float | torch.cuda.Event
Spans = list[tuple[Mark, Mark]]


class StepClock:
    """Of one trainer. When the last timed step is made, it writes the times and ends the program."""

    def __init__(self, run: ComparedRun, worker: int) -> None:
        self._run = run
        self._worker = worker
        self._on_gpu = False
        self._forward: Spans = []
        self._backward: Spans = []
        self._averaging: Spans = []
        self._optimizer: Spans = []
        self._ends: list[Mark] = []
        """When each step ended, from the last one of the warm-up on."""
        self._made = 0
        self._forward_began: list[Mark] = []
        self._step_began: Mark | None = None
        self._last_gradient: Mark | None = None
        self._last_parameter: nn.Parameter | None = None
        self._depth = 0
        self._hooks: list[tuple[nn.Parameter, RemovableHandle]] = []
        self._written = False

    def attach(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Time the steps of these. Called before anyone else's hooks are there, so that those count."""
        parameters = list(dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad))
        self._on_gpu = any(parameter.is_cuda for parameter in parameters)
        for model in models:
            model.register_forward_pre_hook(self._begin_forward, prepend=True)
            model.register_forward_hook(self._end_forward)
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(self._gradient_made)
            self._hooks.append((parameter, handle))
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._begin_step)
            optimizer.register_step_post_hook(self._end_step if optimizer is optimizers[0] else self._end_part)
        self._watch_backward()

    # -- marks --

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def _times(self) -> bool:
        """Whether the warm-up is over."""
        return bool(self._ends)

    # -- the parts --

    def _begin_forward(self, *_: object) -> None:
        if self._times and torch.is_grad_enabled():
            self._forward_began.append(self._mark())

    def _end_forward(self, *_: object) -> None:
        if not self._forward_began:
            return
        began = self._forward_began.pop()
        if not self._forward_began:  # a model that calls another one counts once
            self._forward.append((began, self._mark()))

    def _watch_backward(self) -> None:
        """``loss.backward()`` has no hook of its own: it looks this function up with every call."""
        original: Callable[..., None] = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._depth:  # activation checkpointing computes parts of it inside
                original(*args, **kwargs)
                return
            self._depth += 1
            self._last_gradient = None
            began = self._mark()
            try:
                original(*args, **kwargs)
            finally:
                self._depth -= 1
            self._end_backward(began)

        torch.autograd.backward = backward

    def _end_backward(self, began: Mark) -> None:
        if not self._times:
            return
        ended = self._mark()
        last = self._last_gradient or ended
        self._backward.append((began, last))
        self._averaging.append((last, ended))

    def _gradient_made(self, parameter: torch.Tensor) -> None:
        self._last_gradient = self._mark()
        self._last_parameter = parameter  # type: ignore[assignment]  # the hook is only on parameters

    def _begin_step(self, *_: object) -> None:
        self._step_began = self._mark()

    def _end_part(self, *_: object) -> None:
        if self._times and self._step_began is not None:
            self._optimizer.append((self._step_began, self._mark()))
        self._step_began = None

    def _end_step(self, *_: object) -> None:
        self._end_part()
        self._made += 1
        if self._made >= self._run.warm_up:
            self._ends.append(self._mark())
        if self._made == self._run.warm_up:
            self._watch_last_parameter_only()
        if self._made == self._run.warm_up + self._run.steps:
            self.conclude()
            raise SystemExit(0)

    def _watch_last_parameter_only(self) -> None:
        """From now on the one whose gradient comes last is enough, and cheaper than a mark for each."""
        for parameter, handle in self._hooks:
            if parameter is not self._last_parameter:
                handle.remove()

    # -- the end --

    def conclude(self) -> None:
        """Write the times. May be called again; a program that ends before a timed step leaves none."""
        steps = len(self._ends) - 1
        if steps < 1 or self._written:
            return
        self._written = True
        if self._on_gpu:
            torch.cuda.synchronize()
        parts = StepParts(
            steps=steps,
            step=_seconds(self._ends[0], self._ends[-1]) / steps,
            forward=_sum(self._forward) / steps,
            backward=_sum(self._backward) / steps,
            averaging=_sum(self._averaging) / steps,
            optimizer=_sum(self._optimizer) / steps,
        )
        write_parts(self._run.times_of(self._worker), parts)


def _sum(spans: Spans) -> float:
    return sum(_seconds(began, ended) for began, ended in spans)


def _seconds(began: Mark, ended: Mark) -> float:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event)
    assert isinstance(ended, torch.cuda.Event)
    return float(began.elapsed_time(ended)) / 1000
