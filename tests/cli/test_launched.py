"""``lockstep bench --ps=N --workers=M`` in the processes of a launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.cli.flags import parse_bench
from lockstep.cli.launched import placed
from lockstep.errors import BadInput
from lockstep.library.launcher import LAUNCHED_VARIABLE

BENCH = ("--ps=1", "--workers=2", "--model=lenet", "--device=cpu", "--from_scratch", "--train_dir=run1")


def srun(rank: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        **more,
    }


def met(argv: Sequence[str], **more: str) -> list[list[str]]:
    """The command line of each of three ranks."""
    with ThreadPoolExecutor(3) as ranks, contextlib.ExitStack() as held:
        return list(ranks.map(lambda rank: placed(argv, srun(rank, **more), held), range(3)))


def test_each_process_of_a_launcher_becomes_one_task() -> None:
    lines = met(BENCH)
    configs = [parse_bench(line, {}) for line in lines]
    assert [str(config.task) for config in configs] == [
        "/job:ps/replica:0/task:0",
        "/job:worker/replica:0/task:0",
        "/job:worker/replica:0/task:1",
    ]
    clusters = [config.cluster for config in configs if config.cluster is not None]
    assert len({(cluster.ps_hosts, cluster.worker_hosts) for cluster in clusters}) == 1
    assert len({*clusters[0].ps_hosts, *clusters[0].worker_hosts}) == 3
    assert all("--from_scratch=True" in line for line in lines)
    assert not any("--num_threads" in word for line in lines for word in line)


def test_a_requeued_job_resumes_and_workers_use_the_cores_that_slurm_gave_them() -> None:
    lines = met(BENCH, SLURM_RESTART_COUNT="1", SLURM_CPUS_PER_TASK="2")
    assert not any("from_scratch" in word for line in lines for word in line)
    assert ["--num_threads=2" in line for line in lines] == [False, True, True]


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (BENCH, {}),
        (BENCH, srun(0, SLURM_NTASKS="1")),
        (BENCH, srun(0) | {LAUNCHED_VARIABLE: "1"}),
        (("--ps=1", "--worker=2"), srun(0)),
        (("--help",), srun(0)),
        (("--job_name=ps", "--ps_hosts=a:1", "--worker_hosts=b:1"), srun(0)),
    ],
    ids=["nobody", "one process", "our own launcher", "a mistake", "help", "lists"],
)
def test_a_command_line_that_needs_no_launcher_stays_as_it_is(argv: tuple[str, ...], environ: dict[str, str]) -> None:
    with contextlib.ExitStack() as held:
        assert placed(argv, environ, held) == list(argv)


def test_as_many_processes_as_tasks() -> None:
    with contextlib.ExitStack() as held, pytest.raises(BadInput, match="3 processes, and --ps=2 --workers=2 are 4"):
        placed(("--ps=2", "--workers=2"), srun(0), held)


def test_processes_that_each_train_alone_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as held:
        assert placed(("--model=lenet",), srun(0), held) == ["--model=lenet"]
    assert "each trains alone; --ps=1 --workers=2 makes them one job" in capsys.readouterr().err
