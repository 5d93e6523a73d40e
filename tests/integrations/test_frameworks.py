"""Every example with a framework has the losses of the same framework with DDP, in both shapes of a job."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.programs import Program

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150.0
CLIPPED = "--clip=0.1"  # every gradient of these models is longer
NEEDS = {
    "transformers_loop.py": "transformers",
    "transformers_trainer.py": "transformers",
    "accelerate_loop.py": "accelerate",
    "lightning_module.py": "lightning",
}
ACCUMULATES = ("transformers_trainer.py", "accelerate_loop.py", "lightning_module.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several whole trainings each


def losses(example: str, *flags: str, ranks: int = 2) -> list[float]:
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    command = (sys.executable, *launcher, str(ROOT / "examples" / example), *flags)
    environment: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with Program(command, environment) as program:
        finished = program.wait(SECONDS)
    assert finished.code == 0, finished
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", finished.stdout, re.MULTILINE)]


def need(example: str) -> None:
    if importlib.util.find_spec(NEEDS[example]) is None:
        pytest.skip(f"{NEEDS[example]} is not installed; make test-frameworks installs it")


@pytest.mark.parametrize("example", NEEDS)
def test_losses_are_those_of_ddp(example: str) -> None:
    need(example)
    expected = losses(example, "--ddp", CLIPPED)
    assert len(expected) > 5
    assert losses(example, CLIPPED) == expected


@pytest.mark.parametrize("example", ACCUMULATES)
def test_accumulating_has_the_losses_of_ddp(example: str) -> None:
    need(example)
    expected = losses(example, "--ddp", "--accumulate=2")
    assert losses(example, "--accumulate=2") == expected


@pytest.mark.parametrize("example", NEEDS)
def test_with_a_server_nobody_waits_for_the_rank_that_serves(example: str) -> None:
    """It used to hang: the framework's group waited for a rank that never came."""
    need(example)
    expected = losses(example, "--ddp", "--clip=1e9")
    assert losses(example, "--servers=1", "--clip=1e9", ranks=3) == pytest.approx(expected, abs=1e-5)


def test_the_trainer_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    example = "transformers_trainer.py"
    need(example)
    whole = losses(example, "--ddp", "--steps=12", CLIPPED)
    folder = f"--folder={tmp_path}"
    losses(example, folder, "--steps=6", CLIPPED)
    assert losses(example, folder, "--resume", "--steps=12", CLIPPED)[-6:] == whole[-6:]


def test_lightning_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    example = "lightning_module.py"
    need(example)
    whole = losses(example, "--ddp", "--epochs=2", CLIPPED)
    losses(example, f"--folder={tmp_path}", CLIPPED)
    (saved,) = tmp_path.rglob("*.ckpt")
    resumed = losses(example, f"--resume={saved}", "--epochs=2", CLIPPED)
    assert len(resumed) == len(whole) // 2
    assert resumed[0] != whole[0]
