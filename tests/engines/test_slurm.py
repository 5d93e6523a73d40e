"""Slurm for real: jobs by srun and sbatch on two nodes, with losses, preemption and requeue."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.slurm_host import Slurm, manifest
from engines.trainings import FLAGS, PROGRAM, bits, die_once, digests
from helpers.programs import Finished
from helpers.waiting import wait_until
from lockstep.runtime.processes import descendants

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RUN = ("lockstep", "run", "--")
BENCH = ("lockstep", "bench", *FLAGS, "--num_batches=300")
WHOLE = ("--ps=1", "--workers=2")
STEPS = "--steps=120"
SLOWLY = (STEPS, "--pace=0.4")
BACK = "back into the queue"


@pytest.fixture(autouse=True)
def _nothing_runs_on(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.cancel_all()


def srun(slurm: Slurm, *words: str) -> Finished:
    return slurm.run("srun", "--kill-on-bad-exit=0", *words)


@pytest.fixture(scope="module")
def trained(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The benchmark's model, trained by srun."""
    folder = tmp_path_factory.mktemp("bench")
    done = srun(slurm, "-N2", "-n3", *RUN, *BENCH, *WHOLE, f"--train_dir={folder}")
    assert done.code == 0, done
    return bits(folder)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> set[str]:
    """The program's model, trained by srun."""
    done = srun(slurm, "-N2", "-n3", *RUN, *PROGRAM, STEPS)
    assert done.code == 0, done
    assert "2 ranks train, 1 serves" in done.stdout + done.stderr
    return digests(done.stdout)


def test_a_heterogeneous_step_of_the_bench_gives_the_same_bits(slurm: Slurm, trained: str, tmp_path: Path) -> None:
    bench = (*RUN, *BENCH, *WHOLE, f"--train_dir={tmp_path}")
    parts = ("-n1", "--nodelist=127.0.0.2", *bench, ":", "-n2", "--nodelist=127.0.0.1", *bench)
    done = srun(slurm, *parts)
    assert done.code == 0, done
    assert bits(tmp_path) == trained


def test_a_killed_task_of_the_bench_comes_back_to_the_same_bits(slurm: Slurm, trained: str, tmp_path: Path) -> None:
    """Its monitor starts it again, as often as ``lockstep run`` would."""
    words = ("-N2", "-n3", *RUN, *BENCH, *WHOLE, f"--train_dir={tmp_path}")
    with slurm.started("srun", "--kill-on-bad-exit=0", *words) as program:
        program.wait_for("10\timages/sec", 200)
        (victim,) = processes_with("--lockstep_task", "--job_name=worker", "--task_index=1")
        os.kill(victim, signal.SIGKILL)
        done = program.wait(400)
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
    done = srun(slurm, "-N2", "-n3", *RUN, *PROGRAM, STEPS, *die_once(1, 50, tmp_path / "once"))
    assert done.code == 0, done
    assert "was killed by SIGKILL" in done.stderr
    assert "restarting /job:worker/replica:0/task:1 (1 of 3 restarts)" in done.stderr
    assert digests(done.stdout) == undisturbed


class Job:
    """The program, started by the script that ``lockstep manifest`` writes, slowly enough to be disturbed."""

    def __init__(self, slurm: Slurm, folder: Path, *words: str) -> None:
        self._slurm = slurm
        self._log = folder / "log"
        script = manifest(
            slurm, ("--servers=1", "--workers=2", *words), (*PROGRAM, *SLOWLY, f"--train_dir={folder}/run")
        )
        self.number = slurm.submit(script, f"--output={self._log}")

    def printed(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait_for(self, text: str, seconds: float = 300.0) -> None:
        wait_until(lambda: text in self.printed(), seconds, f"{text!r} in the log of job {self.number}")

    def wait_for_second_start(self) -> None:
        """Slurm starts a job of several parts only when it looks at everything, which it does after a change."""

        def runs() -> bool:
            known = self._slurm.job(self.number)
            if known["JobState"] == "PENDING" and known["Reason"] == "None":
                self._slurm.ask("scontrol", "update", f"JobId={self.number}", "Comment=waiting")
            return known["JobState"] != "PENDING" and known["Restarts"] == "1"

        wait_until(runs, 200, "the second start")

    def check_that_it_resumed(self, undisturbed: set[str]) -> None:
        """It went on with the version that it had saved, and ended with the same bits."""
        before, after = self.printed().split(BACK, 1)
        assert "Exited with exit code 143" in before
        (saved,) = set(re.findall(r"received SIGTERM and ended the job; version (\d+) is saved", before))
        resumed = [int(step) for step in re.findall(r"^step (\d+)$", after, re.MULTILINE)]
        assert min(resumed) == int(saved) > 0
        assert f"at step {saved}\n" in after
        assert digests(after) == undisturbed


def test_a_preempted_job_saves_itself_is_requeued_and_resumes(
    slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.wait_for("step 20\n")
    urgent = slurm.submit("#!/bin/sh\ntrue\n", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    job.wait_for(BACK)
    slurm.wait_for(urgent, "COMPLETED")
    job.wait_for_second_start()
    slurm.wait_for(job.number, "COMPLETED")
    job.check_that_it_resumed(undisturbed)


def test_a_job_near_its_time_limit_saves_itself_and_goes_on_in_another_run(
    slurm: Slurm, undisturbed: set[str], tmp_path: Path
) -> None:
    """Slurm is to send the signal 125 s before the limit, which then is two minutes away: it does when it looks."""
    job = Job(slurm, tmp_path, "--time=20", "--grace=85")
    job.wait_for("step 20\n")
    hours, minutes, _ = map(int, slurm.job(job.number)["RunTime"].split(":"))
    slurm.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 2}")
    job.wait_for(BACK)
    slurm.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=20")
    job.wait_for_second_start()
    slurm.wait_for(job.number, "COMPLETED")
    job.check_that_it_resumed(undisturbed)


def test_a_cancelled_job_is_not_put_back_into_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path)
    job.wait_for("step 5\n")
    slurm.ask("scancel", job.number)
    known = slurm.wait_for(job.number, "CANCELLED")
    slurm.wait_until_idle()
    assert known["Restarts"] == "0"
    assert BACK not in job.printed()
    assert list((tmp_path / "run" / "checkpoints").iterdir()), "it was saved all the same"
