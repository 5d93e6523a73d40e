"""Every example runs, at small size, under torchrun: as two ranks that train, or as one server and two workers."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.programs import Finished, Program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 150.0
pytestmark = pytest.mark.timeout(240)  # whole trainings


def torchrun(name: str, *flags: str, ranks: int = 2) -> Finished:
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    with Program((sys.executable, *launcher, str(EXAMPLES / name), *flags), {"OMP_NUM_THREADS": "1"}) as program:
        finished = program.wait(SECONDS)
    assert finished.code == 0, finished
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
def test_seq2seq_learns(servers: int) -> None:
    small = ("--size=64", "--layers=1", "--length=3", "--steps=60", "--held_out=100", "--learning_rate=3e-3")
    printed = torchrun("seq2seq.py", *small, f"--servers={servers}", ranks=2 + servers).stdout
    assert "2 workers" in printed
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] / 2
    right = re.search(r"([\d.]+)% of 100 held-out sequences are wholly right", printed)
    assert right is not None
    assert float(right[1]) > 20.0  # guessing gives 0.1


@pytest.mark.slow
def test_digits_are_recognised() -> None:
    printed = torchrun("digits.py", "--epochs=6").stdout
    right = re.search(r"([\d.]+)% of 359 held-out digits are correct", printed)
    assert right is not None
    assert float(right[1]) >= 95.0


@pytest.mark.slow
def test_workers_stop_early_together() -> None:
    printed = torchrun("early_stopping.py", "--epochs=3", "--patience=1", "--batch_size=64").stdout
    steps = re.findall(r"worker \d stopped after (\d+) steps, as all did: \[(\d+), (\d+)\]", printed)
    assert len(steps) == 2
    assert len({count for row in steps for count in row}) == 1
    assert "epoch 1: " in printed


@pytest.mark.slow
def test_existing_loop_trains_in_one_process_and_on_a_cluster() -> None:
    with Program((sys.executable, str(EXAMPLES / "existing_loop.py")), {"OMP_NUM_THREADS": "1"}) as program:
        alone = program.wait(SECONDS)
    cluster = torchrun("existing_loop_distributed.py")
    for printed in (alone.stdout, cluster.stdout):
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
        assert losses[-1] < 0.5 * losses[0]
    assert len(re.findall("epoch 9", cluster.stdout)) == 2  # one from each worker


def test_the_distributed_version_is_a_diff_of_a_few_lines() -> None:
    plain, distributed = (
        (EXAMPLES / name).read_text().splitlines()[1:] for name in ("existing_loop.py", "existing_loop_distributed.py")
    )
    changed = [line for line in difflib.ndiff(plain, distributed) if line[0] in "+-" and line[1:].strip()]
    assert len([line for line in changed if line[0] == "+"]) <= 5, changed
    assert len([line for line in changed if line[0] == "-"]) <= 2, changed


@pytest.mark.slow
@pytest.mark.long
def test_digits_at_full_size_reaches_97_percent() -> None:
    right = re.search(r"([\d.]+)% of 359 held-out digits are correct", torchrun("digits.py").stdout)
    assert right is not None
    assert float(right[1]) >= 97.0
