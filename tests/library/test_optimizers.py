"""Every optimizer of torch.optim that works element by element gives the bits of the same loop in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from library.same_loop import Loop, assert_both_agree, assert_same_bits, in_one_process, on_a_cluster

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 2}),
}
FUSED = ("adam", "amsgrad", "adamw", "adagrad")
"""Servers run these with torch's fused kernels unless the program chooses others."""


def loop_with(name: str, **kernels: bool) -> Loop:
    kind, options = OPTIMIZERS[name]
    return Loop(make_optimizer=lambda model: kind(model.parameters(), **options, **kernels))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - set(FUSED)))
def test_optimizer_gives_the_bits_of_one_process(name: str) -> None:
    assert_both_agree(loop_with(name))


@pytest.mark.parametrize("name", FUSED)
def test_optimizer_gives_the_bits_of_one_process_with_the_fused_kernel(name: str) -> None:
    assert_same_bits(on_a_cluster(loop_with(name)), in_one_process(loop_with(name, fused=True)))


@pytest.mark.parametrize("kernels", [{"fused": True}, {"fused": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_kernels_that_the_program_chooses_are_the_servers_too(name: str, kernels: dict[str, bool]) -> None:
    assert_both_agree(loop_with(name, **kernels))
