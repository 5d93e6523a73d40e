"""Checkpoints of ranks as real processes, whatever carries their gradients."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from helpers.marks import others_long
from helpers.ports import free_port
from helpers.programs import Program

SCRIPT = Path(__file__).with_name("saved_ranks.py")


def run(*flags: str) -> tuple[set[str], str]:
    """The digests of all ranks' parameters, and everything that was printed."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    with Program((sys.executable, *launcher, str(SCRIPT), *flags), {"OMP_NUM_THREADS": "1"}) as program:
        finished = program.wait(110)
    assert finished.code == 0, finished
    printed = finished.stdout + finished.stderr
    found = re.findall(r"worker (\d): ([0-9a-f]{64})", printed)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    return {digest for _, digest in found}, printed


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("backend", others_long(["own", "gloo"], ["own"]))
def test_a_job_goes_on_from_its_last_version_with_the_same_bits(backend: str, tmp_path: Path) -> None:
    at_once, _ = run(f"--backend={backend}", f"--train_dir={tmp_path / 'one'}", "--steps=9")
    assert len(at_once) == 1, "all ranks have the same parameters"
    run(f"--backend={backend}", f"--train_dir={tmp_path / 'two'}", "--steps=5")
    resumed, printed = run(f"--backend={backend}", f"--train_dir={tmp_path / 'two'}", "--steps=9")
    assert "at step 5" in printed
    assert resumed == at_once
