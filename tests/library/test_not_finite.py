"""NaN or infinity in a gradient: the first one is named by tensor, worker and step."""

from __future__ import annotations

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
    assert_same_bits,
    in_one_process,
    plain,
    run_jobs,
    small_model,
)
from lockstep.library.clipping import CLIPS_ITS_OWN
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.server.shard_store import TorchShardStore

NAMED = "the gradient of '2.weight' contains NaN or infinity on /job:worker/replica:0/task:1 in step 2"


def train(on_nan: str, *, clip: bool = False) -> tuple[list[Job], list[str], dict[int, Any]]:
    results: dict[int, Any] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        job.wrap(model, optimizer)
        poisoned: list[bool] = []
        if job.worker == 1:
            model[2].weight.register_hook(lambda grad: grad * float("nan") if poisoned else None)
        for step in range(STEPS):
            poisoned[:] = [True] if step in (2, 4) else []
            plain(model, job.worker, step)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
        results[job.worker] = dict(model.named_parameters())

    options = JobOptions(bucket_bytes=BUCKET_BYTES, on_nan=on_nan, on_nan_parameters="report")
    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        jobs = run_jobs(cluster, body, options)
        return jobs, list(cluster.said), results


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipping spreads it to all"])
def test_report_names_the_first_and_goes_on(clip: bool) -> None:
    jobs, said, results = train("report", clip=clip)
    assert said.count(CLIPS_ITS_OWN) == clip
    said = [line for line in said if line != CLIPS_ITS_OWN]
    # From step 3 on the parameters are NaN, and with them everybody's gradients: said once on each worker.
    assert said[0] == f"{NAMED}; the step is applied anyway, and further ones are only counted"
    assert ["task:0 in step 3" in line for line in said[1:] if "gradient" in line] == [True]
    assert [line for line in said if "contains NaN or infinity after step 2" in line]
    assert [job.not_finite_steps for job in jobs] == [STEPS - 3, STEPS - 2]
    assert results[0]["2.weight"].isnan().any()


def test_a_gradient_that_backward_spoils_and_the_program_repairs_is_finite() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.wrap(model, optimizer)
        model[2].weight.register_hook(lambda grad: grad * float("nan"))
        for step in range(STEPS):
            plain(model, job.worker, step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.nan_to_num_().mul_(0.5)
            optimizer.step()

    with in_process_cluster(TWO_SERVERS, TorchShardStore, eager=False) as cluster:
        jobs = run_jobs(cluster, body, JobOptions(bucket_bytes=BUCKET_BYTES))
        assert [job.not_finite_steps for job in jobs] == [0, 0]


def test_skip_leaves_the_step_out_on_every_worker() -> None:
    jobs, said, results = train("skip")
    assert said == [f"{NAMED}; the step is skipped by all workers, and further ones are only counted"]
    assert [job.not_finite_steps for job in jobs] == [0, 2]

    def without_poison(model: Any, worker: int, step: int) -> None:
        plain(model, worker, step)

    healthy = [0, 1, 3, 5]
    loop = Loop(compute=lambda m, w, s: without_poison(m, w, healthy[s]), steps=len(healthy))
    assert_same_bits(list(results.values()), in_one_process(loop))


def test_stop_ends_the_job_on_all_tasks_with_the_name() -> None:
    with pytest.raises(JobEndedError, match=NAMED):
        train("stop")
