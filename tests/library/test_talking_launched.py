"""Workers of torchrun talk to each other, through the job and in a group of torch.distributed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.marks import others_long
from helpers.ports import free_port
from helpers.programs import Program

PROGRAM = Path(__file__).with_name("talking_program.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.mark.parametrize("flags", others_long([("--servers=1",), ("--backend=gloo",)], [("--servers=1",)]))
def test_two_workers_of_torchrun_talk(flags: tuple[str, ...]) -> None:
    ranks = 3 if "--servers=1" in flags else 2
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    with Program((sys.executable, *launcher, str(PROGRAM), *flags), {"OMP_NUM_THREADS": "1"}) as program:
        finished = program.wait(120.0)
    assert finished.code == 0, finished
    for worker in range(2):
        assert f"worker {worker}: (0.5, 1.0, [0, 1], 2, 'gloo')" in finished.stdout
