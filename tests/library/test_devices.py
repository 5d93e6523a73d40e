"""Which of its host's GPUs is a task's own, and ``job.device``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from library.both_shapes import both_shapes, run_in
from library.same_loop import momentum, small_model
from lockstep.library.devices import own_device, place_on_host
from lockstep.library.job import Job
from lockstep.protocol.core.ids import ClusterShape, Role, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec

HOSTS = ("node-1:1", "node-2:1", "node-1:2", "node-1:3")
OTHERS = ("node-1:9", "node-1:8")
INDEXES = pytest.mark.parametrize(("index", "place"), [(0, 0), (1, 0), (2, 1), (3, 2)])


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@INDEXES
@pytest.mark.parametrize("role", list(Role))
def test_tasks_of_a_role_take_their_hosts_gpus_in_turn(role: Role, index: int, place: int) -> None:
    """Those of the other role do not count: a server is near a worker, and a worker needs one to itself."""
    lists: dict[str, Any] = {"ps_hosts": OTHERS, "worker_hosts": OTHERS}
    lists["ps_hosts" if role is Role.SERVER else "worker_hosts"] = HOSTS
    assert place_on_host(ClusterSpec(**lists, task=TaskId(role, index))) == place


@INDEXES
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_worker_has_the_gpu_of_its_place_and_shares_one_if_there_are_too_few(
    gpus: int, index: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, gpus)
    cluster = ClusterSpec(ps_hosts=OTHERS, worker_hosts=HOSTS, task=TaskId(Role.WORKER, index))
    assert own_device(cluster) == torch.device("cuda", place % gpus)


@both_shapes
@pytest.mark.parametrize("gpus", [0, 2])
def test_the_device_of_a_job_is_its_workers(shape: ClusterShape, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: dict[int, Job] = {}

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, momentum(model))
        jobs[job.worker] = job

    run_in(shape, body)
    see_gpus(monkeypatch, gpus)
    expected = [torch.device("cuda", place) if gpus else torch.device("cpu") for place in range(2)]
    assert [jobs[worker].device for worker in range(2)] == expected
