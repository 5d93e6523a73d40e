"""Backup workers, and training without synchronisation."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from helpers.cluster import in_process_cluster
from helpers.waiting import wait_until
from library.same_loop import average, loss_of, plain, run_jobs, small_model
from lockstep.library.job import Job
from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.core.ids import ClusterShape, worker
from lockstep.protocol.core.journal import Happening
from lockstep.training.server.shard_store import TorchShardStore

STEPS = 8


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def coordinator_of(cluster: Any) -> CoordinatorMachine:
    found = cluster.servers[0].machine.coordinator
    assert isinstance(found, CoordinatorMachine)
    return found


def test_a_slow_worker_is_left_out_and_catches_up() -> None:
    """Worker 2 stands still in step 1 until the others have made step 5; it goes on with the newest parameters."""
    others_are_far = threading.Event()
    seen: dict[int, list[int]] = {}
    results: dict[int, Any] = {}

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        seen[job.worker] = []
        for step in job.steps(STEPS):
            seen[job.worker].append(step)
            if job.worker == 2 and step == 1:
                assert others_are_far.wait(20)
            if job.worker != 2 and step == 6:
                others_are_far.set()
            plain(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    with in_process_cluster(ClusterShape(2, 3), TorchShardStore, eager=False, aggregate=2) as cluster:
        jobs = run_jobs(cluster, body)
        coordinator = coordinator_of(cluster)
        contributors = made_of(cluster)
        dropped = coordinator.dropped
    assert seen[0] == sorted(set(seen[0]))
    assert 2 not in seen[2]
    assert jobs[2].missed_steps >= 3
    assert sum(dropped.values()) == STEPS  # in every step two of three
    assert dropped[worker(2)] >= 4
    for one in results.values():
        for name, value in results[0].items():
            assert torch.equal(one[name], value)
    check_against_one_process(contributors, results[0])


def made_of(cluster: Any) -> dict[int, set[int]]:
    """Who contributed to each step, from the journal of the coordinator: everybody but those left out."""
    left_out: dict[int, set[int]] = {}
    for record in cluster.servers[0].journal:
        if record.happening is Happening.DROPPED and record.cause == "not among the first to seal":
            left_out.setdefault(record.step, set()).add(record.peer.index)
    return {step: set(range(3)) - left_out.get(step, set()) for step in range(STEPS)}


def check_against_one_process(contributors: dict[int, set[int]], result: dict[str, Any]) -> None:
    master = small_model()
    optimizer = sgd(master)
    for step in range(STEPS):
        models = [small_model() for _ in contributors[step]]
        for model, index in zip(models, sorted(contributors[step]), strict=True):
            model.load_state_dict(master.state_dict())
            plain(model, index, step)
        average(master, models)
        optimizer.step()
    for name, value in master.named_parameters():
        assert torch.equal(result[name], value), name


def test_dropped_gradients_are_counted_by_sender_where_they_arrive() -> None:
    """A gradient that comes too late is refused by the server and counted under its sender."""
    late = threading.Event()

    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, sgd(model))
        for step in job.steps(3):
            plain(model, job.worker, step)
            if job.worker == 1 and step == 0:
                # Its buckets have left already; only the seal is late.
                assert late.wait(20)
            optimizer.step()
            if job.worker == 0 and step == 0:
                late.set()

    with in_process_cluster(ClusterShape(1, 2), TorchShardStore, eager=False, aggregate=1) as cluster:
        run_jobs(cluster, body)
        role: Any = cluster.servers[0].machine.role
        wait_until(lambda: role.dropped.get(worker(1), 0) > 0, 10, "the drop is counted")
        assert role.snapshot()["dropped"][str(worker(1))] > 0


def test_async_workers_do_not_wait_for_each_other() -> None:
    """Worker 0 makes all its steps while worker 1 stands still; both gradients count."""
    first_is_done = threading.Event()
    losses: dict[int, list[float]] = {0: [], 1: []}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        job.wrap(model, optimizer)
        if job.worker == 1:
            assert first_is_done.wait(20)
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[job.worker].append(float(loss.detach()))
        if job.worker == 0:
            first_is_done.set()

    with in_process_cluster(ClusterShape(1, 2), TorchShardStore, synchronous=False, eager=False) as cluster:
        run_jobs(cluster, body)
    assert losses[0][-1] < losses[0][0]
    # Worker 1 trains its first step from the parameters at the start, and its second from what worker 0 has made.
    assert losses[1][1] < losses[0][1]
    assert losses[1][-1] < losses[0][-1]


def test_async_leaves_parameters_without_a_gradient_alone() -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        job.wrap(model, optimizer)
        before = model[4].weight.detach().clone()
        for step in range(3):
            plain(model, job.worker, step)
            model[4].weight.grad = None
            optimizer.step()
        assert torch.equal(model[4].weight, before)
        assert not torch.equal(model[4].bias, small_model()[4].bias)

    with in_process_cluster(ClusterShape(1, 2), TorchShardStore, synchronous=False, eager=False) as cluster:
        run_jobs(cluster, body)
