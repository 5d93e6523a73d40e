"""``bench/own_program.py``: what its numbers mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lockstep
from own_program import Entrant, Run, parse, ratios, table
from programs import training
from programs.systems import SYSTEMS
from programs.training import Recipe, main, make_optimizer, options

MEMORY = {"host": 3 << 20, "gpu_used": 0, "gpu_allocated": 0, "gpu_reserved": 0}


def test_ratios_are_of_speed_and_within_a_round() -> None:
    ours = [Run(1, 10.0), Run(3, 40.0), Run(4, failure="lost")]
    ddp = [Run(1, 20.0), Run(2, 99.0), Run(3, 20.0), Run(4, 20.0)]
    assert ratios(ours, ddp) == [2.0, 0.5]


def test_a_row_without_numbers_is_still_a_row() -> None:
    runs = {"ddp": [Run(1, 20.0, 15.0, memory=MEMORY)], "ranks": [Run(1, failure="lost")], "server": []}
    lines = table(runs, "ddp", gpu=False)
    assert lines[2] == "| ddp | 20.00 | 1.000 | 15.00 | 1 | 3 | 1.00 |"
    assert "| ranks | failed |" in lines[3]
    assert "| server | not run |" in lines[4]


def test_another_row_is_one_that_is_known_with_more_flags() -> None:
    asked, entrants = parse(["gpt2", "--only=ddp", "--also=16bits=server --join=wire_dtype=bfloat16"])
    assert asked.workers == 2
    assert [entrant.name for entrant in entrants] == ["ddp", "16bits"]
    assert entrants[1] == Entrant("16bits", ("--system=lockstep-servers", "--join=wire_dtype=bfloat16"), servers=1)
    with pytest.raises(SystemExit):
        parse(["gpt2", "--only=horovod"])


@pytest.mark.parametrize(
    ("flags", "workers", "by_job"),
    [
        (["--system=lockstep-servers"], 2, True),  # torch's own would clip each worker's share
        (["--system=lockstep-servers"], 1, False),
        (["--system=lockstep-servers", "--job_clips"], 1, True),
        (["--system=lockstep"], 2, False),
    ],
)
def test_every_system_clips_the_mean(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], workers: int, by_job: bool
) -> None:
    clipped: list[float] = []
    job = SimpleNamespace(worker=0, workers=workers, clip_grad_norm_=clipped.append)
    monkeypatch.setattr(lockstep, "join", lambda **_: job)
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    asked = options(None).parse_args(flags)
    SYSTEMS[asked.system](asked).clip([parameter], 1.0)
    assert clipped == ([1.0] if by_job else [])
    assert parameter.grad.norm().item() == pytest.approx(2.0 if by_job else 1.0)


def test_programs_run_the_kernel_that_servers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.optim.AdamW] = []

    def remembered(model: nn.Module, *, fused: bool) -> torch.optim.AdamW:
        made.append(make_optimizer(model, fused=fused))
        return made[0]

    monkeypatch.setattr(training, "make_optimizer", remembered)
    recipe = Recipe(
        lambda: nn.Linear(2, 2), lambda _: lambda: (torch.ones(2),), lambda model, batch: model(*batch).sum()
    )
    main(options(None).parse_args(["--steps=1", "--warm_up=0"]), recipe)
    assert all(group["fused"] for group in made[0].param_groups)
