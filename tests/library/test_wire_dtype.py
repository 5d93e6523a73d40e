"""16 bits on the wire: each worker's gradient is rounded once, everything else stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
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
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.wire_format import WireFormat

Compute = Callable[[Any, int, int], None]
NARROW = JobOptions(bucket_bytes=BUCKET_BYTES, wire_dtype="bfloat16")


def clipped(model: Any, worker: int, step: int) -> None:
    plain(model, worker, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def rounded(compute: Compute) -> Compute:
    def computed(model: Any, worker: int, step: int) -> None:
        compute(model, worker, step)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.bfloat16().float()

    return computed


def narrow_store() -> TorchShardStore:
    return TorchShardStore(wire=WireFormat("bfloat16"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("compute", [plain, clipped])
def test_each_gradient_is_rounded_once_on_its_way(compute: Compute) -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, adamw(model))
        for step in range(STEPS):
            compute(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    results: dict[int, dict[str, Tensor]] = {}
    with in_process_cluster(TWO_SERVERS, narrow_store, eager=False) as cluster:
        run_jobs(cluster, body, NARROW)
    assert_same_bits(list(results.values()), in_one_process(Loop(compute=rounded(compute), make_optimizer=adamw)))
    exact = in_one_process(Loop(compute=compute, make_optimizer=adamw))
    assert any(not torch.equal(value, results[0][name]) for name, value in exact.items())


def test_published_parameters_are_not_rounded() -> None:
    """They travel as a gradient does, and were rounded with it."""

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, adamw(model))
        plain(model, job.worker, 0)
        optimizer.step()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        job.publish()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    results: dict[int, dict[str, Tensor]] = {}
    with in_process_cluster(TWO_SERVERS, narrow_store, eager=False) as cluster:
        run_jobs(cluster, body, NARROW)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in small_model().named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        assert all(torch.equal(found[name], value) for found in results.values())


def test_float16_is_refused_with_a_sentence() -> None:
    cluster: dict[str, Any] = {"job_name": "worker", "ps_hosts": ["127.0.0.1:1"], "worker_hosts": ["127.0.0.1:2"]}
    with pytest.raises(lockstep.BadInput, match="'float16' is not known here; use one of: float32, bfloat16"):
        lockstep.join(wire_dtype="float16", **cluster)
