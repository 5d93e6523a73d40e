"""torchrun that starts all ranks again: what ``lockstep run`` cannot mend, or where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engines.trainings import BENCH, PROGRAM, RUN, bits, die_once, digests
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Finished, Program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NOT_AGAIN = (*LOCKSTEP, "run", "--restarts=0", "--")


def torchrun(*words: str, restarts: int = 0) -> Finished:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=3")
    options = (f"--max-restarts={restarts}", f"--master-port={free_port()}", "--monitor-interval=0.1")
    with Program((*launcher, *options, *words), {"OMP_NUM_THREADS": "1"}) as program:
        return program.wait(400)


@pytest.fixture(scope="module")
def undisturbed() -> set[str]:
    done = torchrun(*PROGRAM)
    assert done.code == 0, done
    return digests(done.stdout)


@pytest.mark.parametrize("above", [(), NOT_AGAIN], ids=["alone", "below lockstep run"])
def test_all_ranks_start_again_from_the_newest_checkpoint(
    above: tuple[str, ...], undisturbed: set[str], tmp_path: Path
) -> None:
    """``from_scratch`` belongs to the first start: the second one resumes."""
    kept = (f"--train_dir={tmp_path / 'run'}", "--save_model_steps=2", "--from_scratch")
    done = torchrun(*above, *PROGRAM, *kept, *die_once(1, 8, tmp_path / "once"), restarts=1)
    assert done.code == 0, done
    assert (tmp_path / "once").exists()
    assert digests(done.stdout) == undisturbed
    assert done.stdout.count("step 0\n") == 2, "both workers began once"
    assert done.stdout.count("step 11\n") == 2


def test_the_bench_needs_no_lists(tmp_path: Path) -> None:
    done = torchrun(*RUN, *LOCKSTEP, *BENCH, "--num_batches=20", f"--train_dir={tmp_path}")
    assert done.code == 0, done
    assert bits(tmp_path)
