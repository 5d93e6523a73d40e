"""Slurm for real: jobs by srun and sbatch on two nodes, with losses, preemption and requeue."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import library.lasting_program
from engines.slurm_host import Slurm, manifest
from helpers.programs import Finished
from helpers.waiting import wait_until
from lockstep.runtime.processes import descendants

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PROGRAM = (sys.executable, str(library.lasting_program.__file__))
BENCH = ("lockstep", "bench", "--device=cpu", "--model=lenet", "--batch_size=4", "--num_batches=300")
BENCH += ("--num_warmup_batches=0", "--num_threads=1")
RUN = ("lockstep", "run", "--")
STEPS = "--steps=120"


@pytest.fixture(autouse=True)
def _nothing_runs_on(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.cancel_all()


def srun(slurm: Slurm, *words: str) -> Finished:
    return slurm.run("srun", "--kill-on-bad-exit=0", *words)


def bits(folder: Path) -> str:
    return hashlib.sha256((folder / "final.safetensors").read_bytes()).hexdigest()


def digests(text: str) -> set[str]:
    """Of the workers' models."""
    found = re.findall(r"worker \d of 2: (\w{16}) at", text)
    assert len(found) == 2, text
    return set(found)


@pytest.fixture(scope="module")
def trained(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The benchmark's model, trained by srun."""
    folder = tmp_path_factory.mktemp("bench")
    done = srun(slurm, "-N2", "-n3", *RUN, *BENCH, "--ps=1", "--workers=2", f"--train_dir={folder}")
    assert done.code == 0, done
    return bits(folder)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> set[str]:
    """The program's model, trained by srun."""
    done = srun(slurm, "-N2", "-n3", *RUN, *PROGRAM, "--servers=1", STEPS)
    assert done.code == 0, done
    assert "2 ranks train, 1 serves" in done.stdout + done.stderr
    return digests(done.stdout)


def test_a_heterogeneous_step_of_the_bench_gives_the_same_bits(slurm: Slurm, trained: str, tmp_path: Path) -> None:
    bench = (*RUN, *BENCH, "--ps=1", "--workers=2", f"--train_dir={tmp_path}")
    parts = ("-n1", "--nodelist=127.0.0.2", *bench, ":", "-n2", "--nodelist=127.0.0.1", *bench)
    done = srun(slurm, *parts)
    assert done.code == 0, done
    assert bits(tmp_path) == trained


def test_a_killed_task_of_the_bench_comes_back_to_the_same_bits(slurm: Slurm, trained: str, tmp_path: Path) -> None:
    """Its monitor starts it again, as often as ``lockstep run`` would."""
    words = ("-N2", "-n3", *RUN, *BENCH, "--ps=1", "--workers=2", f"--train_dir={tmp_path}")
    with slurm.started("srun", "--kill-on-bad-exit=0", *words) as program:
        program.wait_for("10\timages/sec", 60)
        (victim,) = processes_with("--lockstep_task", "--job_name=worker", "--task_index=1")
        os.kill(victim, signal.SIGKILL)
        done = program.wait(100)
    assert done.code == 0, done
    assert "restarting /job:worker/replica:0/task:1 (1 of 3 restarts)" in done.stderr
    assert bits(tmp_path) == trained


def processes_with(*words: str) -> list[int]:
    """Those below this one whose command lines have all these words; without the reapers that started them."""
    found = []
    for facts in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{facts.pid}/cmdline").read_text()
            if all(word in line for word in words) and "reaper" not in line:
                found.append(facts.pid)
    return found


def test_a_killed_program_comes_back_to_the_same_bits(slurm: Slurm, undisturbed: set[str], tmp_path: Path) -> None:
    die = ("--die=1:50:early", f"--once={tmp_path / 'once'}")
    done = srun(slurm, "-N2", "-n3", *RUN, *PROGRAM, "--servers=1", STEPS, *die)
    assert done.code == 0, done
    assert "was killed by SIGKILL" in done.stderr
    assert "restarting /job:worker/replica:0/task:1 (1 of 3 restarts)" in done.stderr
    assert digests(done.stdout) == undisturbed


def test_a_preempted_job_saves_itself_is_requeued_and_resumes(
    slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    paced = ("--servers=1", STEPS, "--pace=0.1", f"--train_dir={tmp_path / 'run'}")
    script = manifest(slurm, ("--servers=1", "--workers=2"), (*PROGRAM, *paced))
    log = tmp_path / "log"
    job = slurm.submit(script, f"--output={log}")
    wait_until(lambda: log.exists() and "step 20\n" in log.read_text(), 60, "step 20")
    urgent = slurm.submit("#!/bin/sh\ntrue\n", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    wait_until(lambda: "back into the queue" in log.read_text(), 60, "a word in the log")
    slurm.wait_for(urgent, "COMPLETED")
    known = slurm.wait_for(job, "COMPLETED", 150)
    printed = log.read_text()
    assert known["Restarts"] == "1"
    assert "Exited with exit code 143" in printed
    before, after = printed.split("back into the queue", 1)
    made = [int(step) for step in re.findall(r"step (\d+)\n", before)]
    resumed = [int(step) for step in re.findall(r"step (\d+)\n", after)]
    assert min(resumed) == max(made) + 1, "the step that was saved last was made anew, or left out"
    assert digests(after) == undisturbed


def test_a_cancelled_job_is_not_put_back_into_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    paced = ("--servers=1", "--steps=2000", "--pace=0.1", f"--train_dir={tmp_path / 'run'}")
    script = manifest(slurm, ("--servers=1", "--workers=2"), (*PROGRAM, *paced))
    log = tmp_path / "log"
    job = slurm.submit(script, f"--output={log}")
    wait_until(lambda: log.exists() and "step 5\n" in log.read_text(), 60, "step 5")
    slurm.ask("scancel", job)
    known = slurm.wait_for(job, "CANCELLED", 60)
    assert known["Restarts"] == "0"
    assert "back into the queue" not in log.read_text()
