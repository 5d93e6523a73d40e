"""Every example with a framework has the losses of the same framework with DDP, in both shapes of a job."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.programs import Program

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150.0
EXAMPLES = {
    "transformers_loop.py": "transformers",
    "transformers_trainer.py": "transformers",
    "accelerate_loop.py": "accelerate",
    "lightning_module.py": "lightning",
}
"""Each and what it needs."""
CLIPPED = "--clip=0.1"  # every gradient of these models is longer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several whole trainings each


@functools.cache
def losses(example: str, *flags: str, ranks: int = 2) -> list[float]:
    if importlib.util.find_spec(EXAMPLES[example]) is None:
        pytest.skip(f"{EXAMPLES[example]} is not installed; make test-frameworks installs it")
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    command = (sys.executable, *launcher, str(ROOT / "examples" / example), *flags)
    with Program(command, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}) as program:
        finished = program.wait(SECONDS)
    assert finished.code == 0, finished
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", finished.stdout, re.MULTILINE)]


def flags_of(example: str) -> tuple[str, ...]:
    """An ordinary loop has no flag for accumulating."""
    return (CLIPPED,) if example == "transformers_loop.py" else (CLIPPED, "--accumulate=2")


@pytest.mark.parametrize("example", EXAMPLES)
def test_losses_have_the_bits_of_ddps(example: str) -> None:
    expected = losses(example, "--ddp", *flags_of(example))
    assert len(expected) > 5
    assert losses(example, *flags_of(example)) == expected


@pytest.mark.parametrize("example", EXAMPLES)
def test_beside_a_server_losses_are_those_of_ddp(example: str) -> None:
    """It used to hang: the framework's group waited for the rank that serves."""
    expected = losses(example, "--ddp", *flags_of(example))
    assert losses(example, "--servers=1", *flags_of(example), ranks=3) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("servers", [0, 1])
def test_lightning_with_three_workers_ends_and_has_ddps_losses(servers: int) -> None:
    example, three = "lightning_module.py", ("--workers=3", *flags_of("lightning_module.py"))
    expected = losses(example, "--ddp", *three, ranks=3)
    assert len(expected) > 5
    assert losses(example, f"--servers={servers}", *three, ranks=3 + servers) == pytest.approx(expected, abs=1e-5)


def test_the_trainer_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    example, folder = "transformers_trainer.py", f"--folder={tmp_path}"
    whole = losses(example, "--ddp", *flags_of(example))
    half = losses(example, folder, f"--steps={len(whole) // 2}", *flags_of(example))
    assert half == whole[: len(half)]
    assert losses(example, folder, "--resume", *flags_of(example)) == whole


def test_lightning_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    """It does not keep random numbers, so DDP has to resume too."""
    example = "lightning_module.py"
    resumed = []
    for number, system in enumerate([("--ddp",), ()]):
        folder = tmp_path / str(number)
        losses(example, f"--folder={folder}", *system, CLIPPED)
        (saved,) = folder.rglob("*.ckpt")
        resumed.append(losses(example, f"--resume={saved}", "--epochs=2", *system, CLIPPED))
    assert resumed[0] == resumed[1]
    assert resumed[0]
