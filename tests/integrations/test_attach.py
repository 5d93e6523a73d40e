"""An accelerator that trains with a job: what it gives to the job, and what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.cluster import in_process_cluster
from library.same_loop import run_jobs
from lockstep.integrations.accelerate import attach
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import ClusterShape
from lockstep.training.server.mean_store import MeanStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="accelerate is not installed; make test-frameworks installs it",
    ),
    pytest.mark.filterwarnings("ignore"),  # of others
]


def run(body: Callable[[Job, Any], None], ranks: int = 1) -> None:
    from accelerate import Accelerator

    with in_process_cluster(ClusterShape(0, ranks), MeanStore) as cluster:
        run_jobs(cluster, lambda job: body(job, Accelerator(cpu=True)), JobOptions())


def a_step(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_what_is_prepared_again_stays_the_jobs() -> None:
    """A second ``Trainer.train()`` forgets what was prepared, and prepares the same objects once more."""

    def body(job: Job, accelerator: Any) -> None:
        attach(job, accelerator)
        model = nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            accelerator.free_memory()
            found, optimizer = accelerator.prepare(model, plain)
            assert found is model
            a_step(accelerator, model, optimizer)
        assert job.step == 2

    run(body)


def test_another_optimizer_later_is_refused_as_a_second_wrap() -> None:
    def body(job: Job, accelerator: Any) -> None:
        attach(job, accelerator)
        model = nn.Linear(3, 1)
        _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(UsageError, match=r"job\.wrap\(\) was called twice; wrap everything at once"):
            accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
        a_step(accelerator, model, optimizer)

    run(body)


def test_an_accelerator_is_attached_once() -> None:
    def body(job: Job, accelerator: Any) -> None:
        attach(job, accelerator)
        with pytest.raises(UsageError, match="attached to a job already"):
            attach(job, accelerator)
        model = nn.Linear(3, 1)
        a_step(accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1)))

    run(body)


def test_an_accelerator_that_counts_other_processes_is_refused() -> None:
    def body(job: Job, accelerator: Any) -> None:
        with pytest.raises(UsageError, match=r"counts 1 process\(es\), but the job has 2 workers.*use_cpu=True"):
            attach(job, accelerator)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job.wrap(model, optimizer)
        a_step(accelerator, model, optimizer)

    run(body, ranks=2)
