"""``optimizer.step()`` returns before the new parameters are here; whatever uses one waits for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import in_process_cluster
from helpers.holding_store import HoldingStore
from library.same_loop import Loop, in_one_process, loss_of, plain, run_jobs, small_model
from lockstep.library.edit_guard import FIRST_STEPS
from lockstep.library.job import Job
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import ClusterShape
from lockstep.runtime.task.worker_node import WorkerNode

ALONE = ClusterShape(1, 1)
STEPS = 7
HELD = range(FIRST_STEPS, STEPS)
"""Steps that begin before the last bucket is here; before, the parameters of each are compared for edits."""


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> None:
    """Another test of this process may have compiled something, after which each version is awaited as a whole."""
    if (compiler := sys.modules.get("torch._dynamo.utils")) is not None:
        compiler.counters.clear()


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    store: HoldingStore, after_step: Callable[[Job, nn.Module, int], None], protocol: str = "grpc"
) -> dict[str, Tensor]:
    """One worker; ``after_step`` gets the number of the next step."""
    model, jobs = small_model(), []

    def body(job: Job) -> None:
        jobs.append(job)
        _, optimizer = job.wrap(model, with_momentum(model))
        for step in range(STEPS):
            plain(model, 0, step)
            optimizer.step()
            after_step(job, model, step + 1)
            store.let_go(step)

    with in_process_cluster(ALONE, lambda: store, eager=False, protocol=protocol) as cluster:
        run_jobs(cluster, body, JobOptions(bucket_bytes=2048))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_the_first_layer_runs_before_the_last_ones_parameters_are_here(protocol: str) -> None:
    store, overtaken = HoldingStore(HELD.start - 1), []

    def after_step(job: Job, model: nn.Module, step: int) -> None:
        if step not in HELD:
            return
        assert isinstance(job._node, WorkerNode)
        assert not job._node.has_version(step)
        model[0](torch.ones(16))  # type: ignore[index]
        assert not job._node.has_version(step), "it waited for the last layer's parameters"
        overtaken.append(step)

    found = train(store, after_step, protocol)
    expected = in_one_process(Loop(steps=STEPS, shape=ALONE))
    assert overtaken == list(HELD)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def let_go_soon(store: HoldingStore, step: int) -> None:
    threading.Timer(0.05, lambda: store.let_go(step)).start()


USES: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "a moving average": lambda model: [p.detach() * 0.5 for p in model.parameters()],
    "state_dict": lambda model: [value * 0.5 for value in model.state_dict().values()],
    "data": lambda model: [p.data * 0.5 for p in model.parameters()],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_what_reads_all_parameters_after_the_step_reads_new_ones(use: Callable[[nn.Module], list[Tensor]]) -> None:
    store, seen = HoldingStore(HELD.start - 1), {}

    def after_step(_: Job, model: nn.Module, step: int) -> None:
        let_go_soon(store, step - 1)
        seen[step] = use(model)

    train(store, after_step)
    for step in range(1, STEPS + 1):
        expected = in_one_process(Loop(steps=step, shape=ALONE))
        for found, value in zip(seen[step], expected.values(), strict=True):
            assert torch.equal(found, value * 0.5), step


def test_the_optimizers_state_is_that_of_the_newest_step() -> None:
    store = HoldingStore(HELD.start - 1)
    model, alone = small_model(), small_model()
    theirs = with_momentum(alone)
    found = []

    def body(job: Job) -> None:
        _, optimizer = job.wrap(model, with_momentum(model))
        for step in range(HELD.start):
            plain(model, 0, step)
            optimizer.step()
        let_go_soon(store, HELD.start - 1)
        found.append(optimizer.state_dict()["state"])

    with in_process_cluster(ALONE, lambda: store, eager=False) as cluster:
        run_jobs(cluster, body)
    for step in range(HELD.start):
        theirs.zero_grad()
        loss_of(alone, 0, step).backward()
        theirs.step()
    for index, state in theirs.state_dict()["state"].items():
        assert torch.equal(found[0][index]["momentum_buffer"], state["momentum_buffer"])


def test_the_model_has_the_last_parameters_when_the_job_is_closed() -> None:
    store = HoldingStore(HELD.start - 1)
    last = STEPS - 1

    def after_step(_: Job, __: nn.Module, step: int) -> None:
        if step == last + 1:
            let_go_soon(store, last)

    found = train(store, after_step)
    expected = in_one_process(Loop(steps=STEPS, shape=ALONE))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
