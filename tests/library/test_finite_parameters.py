"""Parameters that became NaN or infinite: the first one is named, and the job ends by default. Both shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.cluster import in_process_cluster
from library.same_loop import BUCKET_BYTES, STEPS, plain, run_jobs, small_model
from lockstep.errors import EXIT_FAILED
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.training.server.mean_store import MeanStore
from lockstep.training.server.shard_store import TorchShardStore

SHAPES = [pytest.param(ClusterShape(2, 2), id="servers"), pytest.param(ClusterShape(0, 2), id="ranks")]
FOUND = "parameter '2.weight' contains NaN or infinity after step"
pytestmark = pytest.mark.timeout(120)


def train(shape: ClusterShape, policy: str, bad_step: int = 2, steps: int = STEPS) -> tuple[list[str], dict[int, int]]:
    """A huge rate and a large gradient make one parameter infinite. All gradients are finite then."""
    made: dict[int, int] = {}

    def body(job: Job) -> None:
        model = small_model()
        others = [p for name, p in model.named_parameters() if name != "2.weight"]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": [model[2].weight], "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        job.wrap(model, optimizer)
        model[2].weight.register_hook(lambda grad: grad * 1e6 if optimizer.param_groups[1]["lr"] > 1 else None)
        for step in range(steps):
            optimizer.param_groups[1]["lr"] = 3e38 if step == bad_step else 0.1
            plain(model, job.worker, step)
            optimizer.step()
            made[job.worker] = step + 1

    make = TorchShardStore if shape.servers else MeanStore
    options = JobOptions(bucket_bytes=BUCKET_BYTES, on_nan_parameters=policy)
    with in_process_cluster(shape, make, eager=not shape.servers) as cluster:
        run_jobs(cluster, body, options)
        return list(cluster.said), made


@pytest.mark.parametrize("shape", SHAPES)
def test_the_job_ends_and_names_the_first_parameter_and_the_step(shape: ClusterShape) -> None:
    with pytest.raises(JobEndedError, match=f"{FOUND} 2; lower the learning rate") as caught:
        train(shape, "stop")
    reason = caught.value.outcome.reason
    assert (reason.cause, reason.own_error) == (Cause.FAILED, True)
    assert caught.value.outcome.exit_code(EXIT_FAILED) == EXIT_FAILED


@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_step_counts_too(shape: ClusterShape) -> None:
    with pytest.raises(JobEndedError, match=f"{FOUND} 2"):
        train(shape, "stop", steps=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_report_says_it_once_and_goes_on(shape: ClusterShape) -> None:
    said, made = train(shape, "report")
    assert [line for line in said if "parameter '" in line] == [
        f"{FOUND} 2; the job goes on, since on_nan_parameters is report"
    ]
    assert made == {0: STEPS, 1: STEPS}
