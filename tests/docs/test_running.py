"""What the documents show, run as they show it: commands marked ``run``, programs, and samples of output beside what
is printed now. ``make docs-test``.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from docs.fences import Fence, fences, of_language, sample
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Program
from helpers.waiting import wait_until

pytestmark = [pytest.mark.docs, pytest.mark.timeout(400)]

MADE = [fence for fence in of_language("text") if fence.mark.startswith("made by: lockstep ")]
SEEN_WITH_ITS_OUTPUT = {fence.mark.removeprefix("made by: ") for fence in MADE}
RUN = [fence for fence in fences() if fence.mark == "run" and fence.text.strip() not in SEEN_WITH_ITS_OUTPUT]
"""A command whose sample stands below it runs once, for both."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Commands of these names are those of this Python."""
    folder = tmp_path_factory.mktemp("commands")
    commands = {"lockstep": [*LOCKSTEP], "python": [sys.executable]}
    commands["torchrun"] = [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}"]
    for name, words in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": source}


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("fence", RUN, ids=str)
def test_a_block_runs(fence: Fence, environment: dict[str, str], tmp_path: Path) -> None:
    if fence.language == "python":
        (tmp_path / "piece.py").write_text(fence.text)
        run(["python", "piece.py"], environment, tmp_path)
    else:
        (tmp_path / "out").mkdir()  # for what a run writes
        run(["bash", "-euo", "pipefail", "-c", fence.text], environment, tmp_path)


def alike(text: str) -> str:
    """Without what differs from run to run: numbers, hosts, and where lines end."""
    text = re.sub(r"\b[0-9a-f]{16}\b", "ID", text)
    text = re.sub(r"\bon [\w.-]+(?=[),])", "on HOST", text)
    text = re.sub(r"-?\d[\d.,]*\d|-?\d", "0", text)
    text = re.sub(r"-{20,}", "----", text)
    return " ".join(text.split())


@pytest.mark.parametrize("fence", MADE, ids=str)
def test_a_sample_is_what_is_printed(fence: Fence, environment: dict[str, str], tmp_path: Path) -> None:
    printed = alike(run(shlex.split(fence.mark.removeprefix("made by: ")), environment, tmp_path))
    lines = [alike(line.replace("...", "")) for line in fence.text.splitlines()]
    missing = [line for line in lines if line not in printed]
    assert missing == [], printed


def test_what_may_differ_is_taken_out() -> None:
    assert alike("worker 1 (pid 11706 on node-2), for 3.4 s") == alike("worker 1 (pid 7 on vm), for 12 s")
    assert alike("frozen") != alike("dead")


# -- programs --

PRELUDE = """
import torch
import lockstep

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step):
    return torch.ones(4, 3)


def loss_of(model, given):
    return model(given).square().mean()
"""
JOINED = "job = lockstep.join()\n"
WRAPPED = JOINED + "job.wrap(model, optimizer)\n"
LOOP = WRAPPED + "for step in job.steps(2):\n    loss = loss_of(model, batch(step))\n"

PIECES = {
    ("README.md", "import lockstep"): "{piece}",
    ("library.md", "import lockstep"): "{piece}",
    ("library.md", "model.load_state_dict("): JOINED
    + "checkpoint = {{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}}\n{piece}job.close()",
    ("library.md", "loss.backward()"): LOOP + "{inner}    assert float(norm) > 0",
    ("library.md", "accuracy = "): WRAPPED + "right, held_out, best = 3, [1, 2, 3, 4], 0.9\nwhile True:\n{inner}",
    ("library.md", "job = lockstep.join(..."): "{piece}",
}
"""What stands around a piece; ``inner`` is the piece inside a loop."""


@pytest.mark.parametrize("where", PIECES, ids=lambda where: f"{where[0]}: {where[1]}")
def test_a_piece_of_a_program_runs(where: tuple[str, str], environment: dict[str, str], tmp_path: Path) -> None:
    piece = sample(*where).replace("join(..., ", "join(").replace("/data/run1", str(tmp_path / "run1"))
    piece = re.sub(r"\bjob\.steps\(\d+\)", "job.steps(20)", piece)
    piece = piece.replace("    ...\n", "    loss_of(model, batch(step)).backward()\n    optimizer.step()\n")
    inner = "".join(f"    {line}\n" for line in piece.splitlines())
    (tmp_path / "piece.py").write_text(PRELUDE + PIECES[where].format(piece=piece, inner=inner))
    run(["python", "piece.py"], environment, tmp_path)


def test_the_whole_program(environment: dict[str, str], tmp_path: Path) -> None:
    """Saved as ``train.py`` and started as the page says, alone and as two ranks."""
    (tmp_path / "train.py").write_text(sample("for-researchers.md", "import torch"))
    commands = sample("for-researchers.md", "python train.py")
    printed = run(["bash", "-euo", "pipefail", "-c", commands], environment, tmp_path)
    assert "1 rank trains" in printed
    assert "2 ranks train" in printed
    assert len(re.findall(r"^loss \d", printed, re.MULTILINE)) == 2
    assert (tmp_path / "model.pt").exists()


def test_a_hang_of_ones_own_job(environment: dict[str, str], tmp_path: Path) -> None:
    """The second half of the page about a first diagnosis: start, ask, stop a worker, ask, let it go on."""
    assert sample("README.md", "lockstep bench") == sample("first-diagnosis.md", "lockstep bench")
    job = shlex.split(sample("first-diagnosis.md", "lockstep bench"))
    environment = {**environment, "TMPDIR": str(tmp_path)}
    with Program([*LOCKSTEP, *job[1:]], {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}) as program:
        address = wait_until(lambda: re.findall(r"lockstep why (\S+)", printed_by(program)), 60, "the address")
        wait_until(lambda: "images/sec:" in program.stdout(), 120, "a step line")
        healthy = run(["lockstep", "why", address[0]], environment, tmp_path)
        (pid,) = {int(found) for found in re.findall(r"worker 1 \(pid (\d+)", healthy)}
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        stopped = f"kill -CONT {pid}"
        wait_until(lambda: stopped in printed_by(program), 60, "the report")
        asked = subprocess.run(
            ["lockstep", "why", address[0]], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert asked.returncode == 3
        assert stopped in asked.stdout
        psutil.Process(pid).send_signal(signal.SIGCONT)
        wait_until(lambda: _is_healthy(address[0], environment), 60, "the job goes on")


def printed_by(program: Program) -> str:
    return program.stdout() + program.stderr()


def _is_healthy(address: str, environment: dict[str, str]) -> bool:
    asked = subprocess.run(["lockstep", "why", address], env=environment, capture_output=True, timeout=60, check=False)
    return asked.returncode == 0


# -- the simulator --


def test_a_search_of_the_simulator(environment: dict[str, str], tmp_path: Path) -> None:
    """With fewer seeds than the page, which takes a minute and a half."""
    printed = alike(run(["lockstep", "sim", "--seeds=15"], environment, tmp_path))
    for beginning in ("0 runs of 0 workers and 0 servers, 0 steps each:", "faults that struck:", "how the runs ended:"):
        assert beginning in printed
        assert beginning in alike(sample("simulator.md", "$ lockstep sim --seeds=2000"))
    assert "runs that broke a rule: 0" in printed


def test_a_shortened_run_is_repeated(environment: dict[str, str], tmp_path: Path) -> None:
    """Without the defect that the page planted, the same run is fine."""
    command = sample("simulator.md", "seed 0:").strip().splitlines()[-1]
    assert "repeat it with" in sample("simulator.md", "seed 0:")
    assert "every step exactly once" in run(shlex.split(command), environment, tmp_path)


def test_the_number_of_servers(environment: dict[str, str], tmp_path: Path) -> None:
    """The simulator has no clock but its own: the same numbers on every machine."""
    shown = sample("simulator.md", "$ lockstep sim --workers=64")
    command, *lines = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    printed = " ".join(run(shlex.split(command.removeprefix("$ ")), environment, tmp_path).split())
    assert [line for line in lines if " ".join(line.split()) not in printed] == []
