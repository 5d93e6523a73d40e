"""A server's optimizers, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lockstep.training.server.bare_optimizer import step

PROGRAM = """
import sys, torch
from lockstep.protocol.core.messages import OptimizerEntry
from lockstep.training.server.bare_optimizer import step
from lockstep.training.server.named_optimizer import make_optimizer, warm_up
warm_up()
parameter = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
parameter.grad = torch.ones(4)
for kind in ("SGD", "Adam", "RMSprop"):
    step(make_optimizer(OptimizerEntry(kind, '{"lr": 0.5}'), parameter))
print(parameter[0].item() < 0, "torch._dynamo" in sys.modules)
"""


def test_a_server_updates_parameters_without_importing_the_compiler() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["True", "False"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    ],
)
def test_a_step_gives_the_bits_of_the_optimizers_own(
    kind: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(40, generator=generator), torch.randn(3, 40, generator=generator)
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    bare, whole = (kind([parameter], **options) for parameter in (ours, torchs))  # type: ignore[arg-type]
    for gradient in gradients:
        ours.grad, torchs.grad = gradient.clone(), gradient.clone()
        step(bare)
        whole.step()
    assert torch.equal(ours, torchs)
