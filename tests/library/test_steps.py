"""``job.steps``: the number of the step, its random numbers, and its data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cluster import in_process_cluster
from library.same_loop import plain, run_jobs, small_model
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.sharding import step_seed
from lockstep.protocol.core.ids import ClusterShape
from lockstep.training.server.shard_store import TorchShardStore

ALONE = ClusterShape(1, 1)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def test_random_numbers_of_a_step_follow_from_seed_step_and_worker() -> None:
    def body(job: Job) -> None:
        model = small_model()
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        first = {}
        for step in job.steps(3, seed=5):
            first[step] = drawn()
            plain(model, 0, step)
            optimizer.step()
        assert list(first) == [0, 1, 2]
        assert len(set(first.values())) == 3
        torch.manual_seed(step_seed(5, 1, 0))
        assert float(torch.rand(1)) == first[1][0]
        further = list(job.steps(2, seed=5))
        assert further == [3, 4]
        assert job.step == 3  # the last two made no step of the optimizer

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)


def test_without_a_seed_random_numbers_are_left_alone() -> None:
    def body(job: Job) -> None:
        torch.manual_seed(1)
        expected = [float(torch.rand(1)) for _ in range(3)]
        torch.manual_seed(1)
        assert [float(torch.rand(1)) for _ in job.steps(3, seed=None)] == expected

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)


def test_seeds_differ_wherever_one_of_the_three_does() -> None:
    seeds = {step_seed(seed, step, worker) for seed in range(5) for step in range(20) for worker in range(5)}
    assert len(seeds) == 5 * 20 * 5


def test_steps_position_the_data() -> None:
    def body(job: Job) -> None:
        data = job.shard(list(range(40)), 4, shuffle=True, collate=list)
        for step in job.steps(6, data=data):
            assert next(iter(data)) == data[step]

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)


def test_every_worker_sees_its_own_share() -> None:
    seen: dict[int, Any] = {}

    def body(job: Job) -> None:
        data = job.shard(list(range(11)), 2, collate=list)
        seen[job.worker] = list(data)

    with in_process_cluster(ClusterShape(1, 2), TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    assert seen == {0: [[0, 2], [4, 6], [8, 10]], 1: [[1, 3], [5, 7], [9]]}


def test_a_negative_number_of_steps_is_refused() -> None:
    def body(job: Job) -> None:
        with pytest.raises(UsageError, match="is negative"):
            next(job.steps(-1))

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
