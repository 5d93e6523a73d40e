"""The library with a model on a GPU and servers on the CPU.

Compared within 1e-5: the mean and the update are made on the CPU here and on the GPU in one process, and the two round
differently.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from helpers.cluster import in_process_cluster
from library.same_loop import (
    BUCKET_BYTES,
    STEPS,
    TWO_SERVERS,
    Loop,
    in_one_process,
    on_a_cluster,
    plain,
    run_jobs,
    small_model,
)
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.server.shard_store import TorchShardStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


GOES_ON = JobOptions(bucket_bytes=BUCKET_BYTES, on_nan_parameters="report")


def gpu_model() -> Any:
    return small_model().cuda()


def gpu_plain(model: Any, worker: int, step: int) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs, targets = (torch.randn(8, 16, generator=generator).cuda() for _ in range(2))
    nn.functional.mse_loss(model(inputs), targets).backward()


def gpu_clipped(model: Any, worker: int, step: int) -> None:
    gpu_plain(model, worker, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def gpu_branching(model: Any, worker: int, step: int) -> None:
    gpu_plain(model, worker, step)
    if step % 2:
        model[2].weight.grad = None


@pytest.mark.parametrize("compute", [gpu_plain, gpu_clipped, gpu_branching])
def test_loop_on_a_gpu_agrees_with_one_process(compute: Any) -> None:
    loop = Loop(
        compute=compute, make_model=gpu_model, make_optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01)
    )
    expected = in_one_process(loop)
    for result in on_a_cluster(loop):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-5)


def test_scaler_on_a_gpu_skips_on_all_workers() -> None:
    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(4, 16, device="cuda")).square().mean()
            factor = float("inf") if step == 2 and job.worker == 1 else 1.0
            scaler.scale(loss * factor).backward()
            before = model[0].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model[0].weight, before) == (step == 2)
        finals.append(model[0].weight.detach().cpu())

    finals: list[Any] = []
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
        assert cluster.said == []
    assert torch.equal(finals[0], finals[1])


def test_not_a_number_on_a_gpu_is_named() -> None:
    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[2].weight.register_hook(lambda grad: grad * float("nan"))
        gpu_plain(model, 0, 0)
        optimizer.step()

    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body, GOES_ON)
        found = "'2.weight' contains NaN or infinity on /job:worker/replica:0/task:0 in step 0"
        assert [found in line for line in cluster.said if "gradient" in line] == [True]


def test_a_step_that_is_not_finite_is_counted_with_the_next_or_when_asked() -> None:
    """The training thread does not wait for the GPU to see it."""
    found: list[tuple[int, int]] = []

    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        poisoned: list[bool] = []
        model[2].weight.register_hook(lambda grad: grad * float("nan") if poisoned else None)
        for step in range(STEPS):
            poisoned[:] = [True] if step == STEPS - 1 else []
            gpu_plain(model, job.worker, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append((len(cluster.said), job.not_finite_steps))

    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster:
        jobs = run_jobs(cluster, body, GOES_ON)
        last = f"'2.weight' contains NaN or infinity on /job:worker/replica:0/task:0 in step {STEPS - 1}"
        assert [last in line for line in cluster.said if "gradient" in line] == [True]
        assert [job.not_finite_steps for job in jobs] == [1]
    assert found == [(0, 1)]


def test_parameters_that_are_not_finite_end_a_job_on_a_gpu() -> None:
    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=3e38))
        model[2].weight.register_hook(lambda grad: grad * 1e6)
        for step in range(STEPS):
            gpu_plain(model, job.worker, step)
            optimizer.step()

    found = r"parameter '\S+' contains NaN or infinity after step \d+"
    with (
        in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster,
        pytest.raises(JobEndedError, match=found),
    ):
        run_jobs(cluster, body)


def test_a_replayed_graph_has_the_parameters_of_its_step() -> None:
    """It reads them without a call of torch that could be watched."""

    def body(job: Job) -> None:
        model = gpu_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        given = torch.ones(8, 16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(side):
            model(given)  # libraries are loaded outside of the capture
        torch.cuda.synchronize()
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            answer = model(given)
        for step in range(STEPS):
            gpu_plain(model, job.worker, step)
            optimizer.step()
            graph.replay()
            replayed = answer.clone()
            with torch.no_grad():
                assert torch.equal(replayed, model(given))

    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)


def test_moving_the_model_to_a_gpu_after_wrapping() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        plain(model, 0, 0)
        model.cuda()
        optimizer.step()

    with (
        in_process_cluster(ClusterShape(1, 1), TorchShardStore, eager=False) as cluster,
        pytest.raises(UsageError, match=r"'0\.weight' was moved from cpu to cuda:0 after job\.wrap"),
    ):
        run_jobs(cluster, body)


STEP_LINE = re.compile(r"^(\d+)\timages/sec: .*\t(\S+)$", re.MULTILINE)
BENCH = (
    *("-m", "lockstep", "bench", "--ps=1", "--workers=2", "--device=gpu", "--model=lenet", "--batch_size=32"),
    *("--num_batches=40", "--num_warmup_batches=2", "--display_every=4", "--optimizer=momentum", "--verbose"),
    *("--deterministic", "--local_parameter_device=gpu", "--bucket_mb=1"),
)


@pytest.mark.timeout(180)  # nearly a minute with what torch compiles kept from a former run
def test_tasks_on_one_gpu_that_wait_for_each_other_there_compute_the_same() -> None:
    """Handed on before it is computed, or after: the same losses, with MPS and in turns."""

    def losses(*flags: str) -> tuple[dict[str, str], str]:
        done = subprocess.run(
            [sys.executable, *BENCH, *flags], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(STEP_LINE.findall(done.stdout)), done.stderr

    # Where lost tasks come back nothing is handed on early.
    expected, said = losses("--restarts=1")
    assert len(expected) == 11
    assert said.count("and ps 0 are on one GPU; their tensors cross host memory") == 2
    assert "which waits for their copies" not in said
    for flags in ((), ("--nomps",)):
        found, said = losses(*flags)
        assert said.count("and ps 0 are on one GPU, which waits for their copies by itself") == 2
        assert said.count("and ps 0 are on one GPU, and their tensors stay in its memory") == 2
        assert found == expected
