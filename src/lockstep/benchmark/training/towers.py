"""The model of a worker on each of its devices (``--num_gpus``), and how their gradients are combined.

Tower 0 holds the worker's parameters; the others are copies that take its values before every step. Their backward
runs first. Then tower 0's runs, and as each of its gradients is ready, a hook adds the others' to it. Code that sends
or applies gradients hooks tower 0 after this hook and need not know about towers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.training.torch_private import foreach_copy_
from lockstep.training.worker.loss_scale import LossScale


class Towers:
    """``independent``: the towers share nothing; otherwise all use the mean of their gradients."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device], *, independent: bool) -> None:
        self.models = [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]
        self.devices = tuple(devices)
        self.independent = independent
        self._parameters: list[list[Tensor]] = [
            [p for p in tower.parameters() if p.requires_grad] for tower in self.models
        ]

    def __len__(self) -> int:
        return len(self.models)

    def take_values(self) -> None:
        """Copy tower 0's parameters to the others."""
        if self.independent:
            return
        with torch.no_grad():
            for others in self._parameters[1:]:
                foreach_copy_(others, self._parameters[0])

    def hook_gradients(self, scale: LossScale, clip: float | None) -> None:
        """Reduce over towers, divide by the loss scale and clip, as soon as a gradient of tower 0 is ready."""
        towers = [self._parameters[0]] if not self.independent else self._parameters
        reduces = len(self) > 1 and not self.independent
        if not reduces and scale.factor == 1.0 and clip is None:
            return
        for parameters in towers:
            for number, parameter in enumerate(parameters):
                others = [tower[number] for tower in self._parameters[1:]] if reduces else []
                self._hook(parameter, others, scale, clip)

    def _hook(self, parameter: Tensor, others: list[Tensor], scale: LossScale, clip: float | None) -> None:
        divisor = 1 + len(others)

        def finish(owner: Tensor) -> None:
            gradient = owner.grad
            assert gradient is not None
            for other in others:
                if other.grad is not None:
                    gradient.add_(other.grad.to(gradient.device))
                    other.grad = None
            divide_by = divisor * scale.factor
            if divide_by != 1:
                gradient.div_(divide_by)
            if clip is not None:
                gradient.clamp_(-clip, clip)

        parameter.register_post_accumulate_grad_hook(finish)
