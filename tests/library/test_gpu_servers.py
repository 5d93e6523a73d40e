"""Servers whose parameters are on a GPU, with workers on the same one: in one process, and as programs of one's own."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cluster import in_process_cluster
from helpers.ports import free_port, free_ports
from helpers.programs import LOCKSTEP, Finished, Program
from helpers.waiting import wait_until
from library.same_loop import STEPS, TWO_SERVERS, Loop, in_one_process, on_a_cluster, run_jobs
from library.test_gpu import gpu_branching, gpu_clipped, gpu_model, gpu_plain
from lockstep.library.job import Job
from lockstep.training.server.shard_store import TorchShardStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(240),
]

PROGRAM = (sys.executable, str(Path(__file__).with_name("gpu_program.py")))
ONE_GPU = "and ps 0 are on one GPU, which waits for their copies by itself"
SAME_MEMORY = "and ps 0 are on one GPU, and their tensors stay in its memory"
HOST_MEMORY = "and ps 0 are on one GPU; their tensors cross host memory, where they outlive a lost worker"
SECONDS = 150.0
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def gpu_store() -> TorchShardStore:
    return TorchShardStore(torch.device("cuda", 0))


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("compute", [gpu_plain, gpu_clipped, gpu_branching])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_on_the_servers_gpu_agree_with_one_process(name: str, compute: Any) -> None:
    loop = Loop(compute=compute, make_model=gpu_model, make_optimizer=OPTIMIZERS[name])
    expected = in_one_process(loop)
    for result in on_a_cluster(loop, make_store=gpu_store):
        for key, value in expected.items():
            torch.testing.assert_close(result[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("store", [gpu_store, TorchShardStore], ids=["on the GPU", "on the CPU"])
def test_the_mean_is_clipped_where_the_servers_are(store: Any) -> None:
    norms: dict[int, list[float]] = {}

    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        found = []
        for step in range(STEPS):
            gpu_plain(model, job.worker, step)
            found.append(job.clip_grad_norm_(0.1))
            optimizer.step()
        assert found[0].is_cuda
        norms[job.worker] = [float(norm) for norm in found]

    with in_process_cluster(TWO_SERVERS, store, eager=False) as cluster:
        run_jobs(cluster, body)
    assert norms[0] == norms[1]
    assert all(norm > 0.1 for norm in norms[0])


def test_published_parameters_and_a_saved_state_reach_the_servers_gpu() -> None:
    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(STEPS):
            gpu_plain(model, job.worker, step)
            optimizer.step()
        saved = optimizer.state_dict()
        assert float(saved["state"][0]["step"]) == STEPS
        assert saved["state"][0]["exp_avg"].is_cuda
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.125 + job.worker)
        job.publish()
        optimizer.load_state_dict(saved)
        assert all(bool((parameter == 0.125).all()) for parameter in model.parameters())
        gpu_plain(model, job.worker, 0)
        optimizer.step()
        assert float(optimizer.state_dict()["state"][0]["step"]) == STEPS + 1
        finals.append(torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()]))

    finals: list[torch.Tensor] = []
    with in_process_cluster(TWO_SERVERS, gpu_store, eager=False) as cluster:
        run_jobs(cluster, body)
    assert torch.equal(finals[0], finals[1])
    assert not bool((finals[0] == 0.125).all())


def run_all(commands: list[tuple[tuple[str, ...], dict[str, str]]]) -> list[Finished]:
    with ExitStack() as started:
        programs = [started.enter_context(Program(command, {**DETERMINISTIC, **more})) for command, more in commands]
        finished = [program.wait(SECONDS) for program in programs]
    assert [one.code for one in finished] == [0] * len(finished), finished
    return finished


def results(finished: list[Finished]) -> list[tuple[str, float]]:
    found = [re.search(r"worker \d of \d: (\w+) norm (\S+)", one.stdout) for one in finished]
    return [(match[1], float(match[2])) for match in found if match is not None]


def with_lists(workers: int, *words: str) -> list[Finished]:
    return run_all([(command, {}) for command in commands(workers, *words)])


def commands(workers: int, *words: str) -> list[tuple[str, ...]]:
    """The server's, and one for each worker."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(1 + workers)]
    lists = (f"--ps_hosts={ports[0]}", f"--worker_hosts={','.join(ports[1:])}")
    own = ("--clip", "--endless")
    shared = tuple(word for word in words if word not in own)
    server = (*LOCKSTEP, "ps", *lists, *shared, "--task_index=0")
    trained = [(*PROGRAM, *lists, *words, "--job_name=worker", f"--task_index={i}") for i in range(workers)]
    return [server, *trained]


@pytest.mark.parametrize("clip", [(), ("--clip",)], ids=["as it is", "clipped"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_on_the_workers_gpu_gives_the_same_bits_early_or_late(workers: int, clip: tuple[str, ...]) -> None:
    """Where a lost worker may come back, tensors cross host memory, and nothing is passed on before it is computed;
    otherwise the GPU waits itself, and they stay in its memory."""
    late = with_lists(workers, "--device=gpu", *clip)
    early = with_lists(workers, "--device=gpu", "--on_worker_loss=abort", *clip)
    host = with_lists(workers, "--on_worker_loss=abort", *clip)
    assert not any(ONE_GPU in one.stderr or SAME_MEMORY in one.stderr for one in (*late, *host))
    assert sum(HOST_MEMORY in one.stderr for one in late) == workers
    assert sum(ONE_GPU in one.stderr for one in early) == workers
    assert sum(SAME_MEMORY in one.stderr for one in early) == workers
    assert len({digest for digest, _ in (*results(late), *results(early))}) == 1
    assert len({digest for digest, _ in results(host)}) == 1
    assert results(host)[0][1] == pytest.approx(results(early)[0][1], rel=1e-3)


@pytest.mark.parametrize("wire", [(), ("--wire_dtype=bfloat16",)], ids=["in full", "16 bits"])
def test_ranks_of_a_launcher_serve_from_the_gpu(wire: tuple[str, ...]) -> None:
    job = free_port()
    command = (*PROGRAM, "--servers=1", "--device=gpu", "--clip", *wire)
    environments = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "3",
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(3)
    ]
    finished = run_all([(command, environment) for environment in environments])
    found = results(finished)
    assert len(found) == 2
    assert found[0] == found[1]
    assert sum(ONE_GPU in one.stderr for one in finished) == 2
    assert sum(SAME_MEMORY in one.stderr for one in finished) == 2


def test_a_rank_does_not_wait_for_the_gpu_in_every_step() -> None:
    """With NCCL: the one of a program that nobody else was started with."""
    found = results(run_all([((*PROGRAM, "--refuse_waits"), {})]))
    assert len(found) == 1


def test_a_killed_worker_whose_memory_the_server_reads_is_named() -> None:
    """The memory of a dead process is read or waited for by others: they must not fail of that, nor wait for ever."""
    with ExitStack() as started:
        server, first, second = (
            started.enter_context(Program(command, DETERMINISTIC))
            for command in commands(2, "--device=gpu", "--on_worker_loss=abort", "--endless")
        )
        wait_until(
            lambda: all(SAME_MEMORY in one.stderr() for one in (first, second)), 100.0, "workers that share memory"
        )
        second.signal(signal.SIGKILL)
        ended = [one.wait(60.0) for one in (server, first)]
    for one in ended:
        assert one.code not in (0, -signal.SIGSEGV), one
        assert "worker 1 was killed by sigkill" in one.stderr.lower()
        assert "CUDA error" not in one.stderr
