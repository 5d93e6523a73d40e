"""The same training loop twice: on a cluster through the library, and in one process that averages by hand.

The numbers of the layers are multiples of 16, so that flat buckets and separate parameters take the same vector
instructions; then the two agree bit for bit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.cluster import InProcessCluster, in_process_cluster
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.shard_store import TorchShardStore

BUCKET_BYTES = 2048
"""Small, so that a layer is cut into several buckets and some buckets are shared."""

STEPS = 6
TWO_SERVERS = ClusterShape(2, 2)

Compute = Callable[[Any, int, int], None]
"""Fill the gradients of this model for (worker, step): all that comes before ``optimizer.step()``."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


_BUILDING = threading.Lock()
"""Workers of these tests are threads of one process and share its random numbers."""


def small_model() -> Any:
    with _BUILDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 16))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def loss_of(model: Any, worker: int, step: int) -> Tensor:
    inputs, targets = batch(worker, step)
    return nn.functional.mse_loss(model(inputs), targets)


def plain(model: Any, worker: int, step: int) -> None:
    model.zero_grad()
    loss_of(model, worker, step).backward()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Loop:
    """One training loop: what it trains, how, and how long."""

    compute: Compute = plain
    make_model: Callable[[], Any] = small_model
    make_optimizer: MakeOptimizer = momentum
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    steps: int = STEPS
    shape: ClusterShape = TWO_SERVERS
    summed: bool = False


def in_one_process(loop: Loop) -> dict[str, Tensor]:
    """Every worker's gradients, their mean in the order of workers, the program's own optimizer."""
    master = loop.make_model()
    optimizer = loop.make_optimizer(master)
    scheduler = loop.make_scheduler(optimizer) if loop.make_scheduler else None
    models = [copy.deepcopy(master) for _ in range(loop.shape.workers)]
    for step in range(loop.steps):
        for worker, model in enumerate(models):
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), master.parameters(), strict=True):
                    mine.copy_(theirs)
            loop.compute(model, worker, step)
        average(master, models, summed=loop.summed)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: p.detach().clone() for name, p in master.named_parameters()}


def average(master: nn.Module, models: Sequence[nn.Module], *, summed: bool = False) -> None:
    """The mean of what is there; a gradient that only some have counts as zero for the others."""
    for target, *sources in zip(master.parameters(), *(m.parameters() for m in models), strict=True):
        grads = [s.grad for s in sources]
        if all(g is None for g in grads):
            target.grad = None
            continue
        total = torch.zeros_like(target)
        dense = [torch.zeros_like(target) if g is None else g for g in grads]
        total.copy_(dense[0])
        for other in dense[1:]:
            total += other
        target.grad = total if summed or len(dense) == 1 else total / len(dense)


def run_jobs(cluster: InProcessCluster, body: Callable[[Job], None], options: JobOptions | None = None) -> list[Job]:
    """Run ``body`` as every worker's program; raises what the first of them raised."""
    jobs: list[Job] = []

    def train(node: WorkerNode) -> None:
        node.wait_until_member()
        job = Job(node, options or JobOptions(bucket_bytes=BUCKET_BYTES), cluster.said.append, lambda: None)
        jobs.append(job)
        with job:
            body(job)

    cluster.run(train)
    return sorted(jobs, key=lambda job: job.worker)


def on_a_cluster(loop: Loop, **cluster_options: Any) -> list[dict[str, Tensor]]:
    """The final parameters of every worker."""
    results: dict[int, dict[str, Tensor]] = {}
    models = [loop.make_model() for _ in range(loop.shape.workers)]

    def body(job: Job) -> None:
        model = models[job.worker]
        if not job.is_chief:
            with torch.no_grad():  # only the chief's initial values may count
                for parameter in model.parameters():
                    parameter.add_(1.0)
        optimizer = loop.make_optimizer(model)
        scheduler = loop.make_scheduler(optimizer) if loop.make_scheduler else None
        job.wrap(model, optimizer)
        for step in range(loop.steps):
            loop.compute(model, job.worker, step)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    with in_process_cluster(loop.shape, TorchShardStore, eager=False, summed=loop.summed, **cluster_options) as cluster:
        run_jobs(cluster, body)
    return [results[worker] for worker in range(loop.shape.workers)]


def assert_same_bits(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(result[name], value), f"{name} differs by {(result[name] - value).abs().max()}"


def assert_both_agree(loop: Loop) -> None:
    """Bit for bit."""
    assert_same_bits(on_a_cluster(loop), in_one_process(loop))
