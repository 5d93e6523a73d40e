"""16 bits on the wire: each worker's gradient is rounded once, everything else stays as it is."""

from __future__ import annotations

import dataclasses
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
    batch,
    in_one_process,
    plain,
    run_jobs,
    small_model,
)
from lockstep.library.job import Job
from lockstep.library.join import JoinArguments, join_with
from lockstep.library.settings import Exchange, exchange_problems
from lockstep.library.training_way import JobOptions
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.plan import BUFFERS, Plan
from lockstep.training.server.mean_store import MeanStore
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
            if parameter.dtype == torch.float32 and parameter.grad is not None:
                parameter.grad = parameter.grad.bfloat16().float()

    return computed


def narrow_ranks() -> MeanStore:
    return MeanStore(WireFormat("bfloat16"))


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


@pytest.mark.parametrize("shape", [TWO_SERVERS, ClusterShape(0, 2)], ids=["servers", "ranks"])
def test_published_parameters_are_not_rounded(shape: ClusterShape) -> None:
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
    store: Callable[[], Any] = narrow_store if shape.servers else narrow_ranks
    with in_process_cluster(shape, store, eager=not shape.servers) as cluster:
        run_jobs(cluster, body, NARROW)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in small_model().named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        assert all(torch.equal(found[name], value) for found in results.values())


def test_float16_is_refused_with_a_sentence() -> None:
    cluster: dict[str, Any] = {"job_name": "worker", "ps_hosts": ["127.0.0.1:1"], "worker_hosts": ["127.0.0.1:2"]}
    with pytest.raises(lockstep.BadInput, match="'float16' is not known here; use one of: float32, bfloat16"):
        lockstep.join(wire_dtype="float16", **cluster)


# -- where every rank trains --

THIRD, LARGE = 1 / 3, (1 << 40) + 1
"""Numbers that 16 bits do not have."""


class Mixed(nn.Module):
    """Also numbers of 64 bits, a layer that is not always used, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.sometimes = nn.Parameter(torch.full((48,), THIRD))
        self.wide = nn.Parameter(torch.linspace(0, 1, 16, dtype=torch.float64))
        self.register_buffer("fraction", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def mixed(model: Any, worker: int, step: int) -> None:
    """In step 1 nobody has a gradient of ``sometimes``, in others only some."""
    model.zero_grad()
    inputs, targets = batch(worker, step)
    loss = nn.functional.mse_loss(model.body(inputs) * model.wide, targets.double())
    if step != 1 and (step + worker) % 2:
        loss = loss + (model.sometimes.square() / (3 + worker)).sum()
    loss.backward()


def trained(ranks: int, protocol: str, *, returns: bool = False) -> list[dict[str, Tensor]]:
    """What every rank ends with."""
    results: dict[int, dict[str, Tensor]] = {}
    models = [Mixed() for _ in range(ranks)]

    def body(job: Job) -> None:
        model = models[job.worker]
        optimizer = adamw(model)
        if not job.is_chief:
            with torch.no_grad():
                model.wide.add_(1.0)
        job.wrap(model, optimizer)
        for step in range(STEPS):
            if job.is_chief:
                model.get_buffer("fraction").fill_(THIRD + step)
                model.get_buffer("count").fill_(LARGE + step)
            mixed(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    rules = RecoveryRules(ranks_return=returns)
    with in_process_cluster(ClusterShape(0, ranks), narrow_ranks, protocol=protocol, recovery=rules) as cluster:
        run_jobs(cluster, body, NARROW)
    return [results[rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["grpc", "grpc+tcp", "grpc+shm"])
def test_every_rank_rounds_each_gradient_once_also_for_its_own_share(protocol: str, ranks: int) -> None:
    found = trained(ranks, protocol)
    told = {"fraction": torch.full((3,), THIRD + STEPS - 1), "count": torch.tensor(LARGE + STEPS - 1)}
    loop = Loop(compute=rounded(mixed), make_model=Mixed, make_optimizer=adamw, shape=ClusterShape(0, ranks))
    assert_same_bits(found, in_one_process(loop) | told)
    exact = in_one_process(dataclasses.replace(loop, compute=mixed))
    assert any(not torch.equal(value, found[0][name]) for name, value in exact.items())


def test_where_ranks_come_back_gradients_are_rounded_the_same() -> None:
    for one, other in zip(trained(2, "grpc", returns=True), trained(2, "grpc"), strict=True):
        assert_same_bits([one], other)


def received_by_ranks(name: str) -> tuple[list[int], Plan]:
    """The bytes that each of two ranks received."""
    found: dict[int, int] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = adamw(model)
        job.wrap(model, optimizer)
        for step in range(STEPS):
            plain(model, job.worker, step)
            optimizer.step()
        connection = next(iter(cluster.workers[job.worker].peers.values())).connection
        assert connection is not None
        assert connection.endpoint is not None
        found[job.worker] = connection.endpoint.counters().bytes_received

    options = JobOptions(bucket_bytes=BUCKET_BYTES, wire_dtype=name)
    with in_process_cluster(ClusterShape(0, 2), lambda: MeanStore(WireFormat(name))) as cluster:
        run_jobs(cluster, body, options)
        plan = cluster.workers[0].plan
    assert plan is not None
    return [found[0], found[1]], plan


def test_the_gradients_of_a_rank_are_half_the_bytes_and_means_are_not() -> None:
    whole, plan = received_by_ranks("float32")
    narrow, _ = received_by_ranks("bfloat16")
    for rank in range(2):
        # Of the chief's buffers and digests nobody else sends anything, and they are not rounded.
        gradients = sum(bucket.nbytes for bucket in plan.buckets_of(rank) if plan.names_in(bucket.id) != (BUFFERS,))
        assert gradients > BUCKET_BYTES
        assert whole[rank] - narrow[rank] == STEPS * gradients // 2


@pytest.mark.parametrize("backend", ["gloo", "nccl", None])
def test_where_torch_carries_the_gradients_16_bits_are_refused(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds up in the type that it sends."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(lockstep.BadInput, match="wire_dtype='bfloat16' is not possible where gloo or NCCL carries"):
        join_with(JoinArguments(wire_dtype="bfloat16", backend=backend), {})


def test_over_our_own_transports_16_bits_are_not_refused() -> None:
    assert not list(exchange_problems(Exchange(wire_dtype="bfloat16"), 2, 0))
