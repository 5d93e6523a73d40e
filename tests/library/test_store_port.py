"""Where the store of torch.distributed listens, if that carries the gradients."""

from __future__ import annotations

import torch

from helpers.ports import free_port, free_range
from lockstep.library.rank_averager import meeting_point
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import CHIEF
from lockstep.runtime.startup.cluster import ClusterSpec

CPU = torch.device("cpu")
LAUNCHED = JobOptions(find_store=lambda _job, port: ("127.0.0.1", port))


def test_a_launched_job_keeps_its_store_at_one_of_the_ports_that_tasks_may_use() -> None:
    first, last = free_range(4)
    spec = ClusterSpec(worker_hosts=(f"127.0.0.1:{first}",), ports=f"{first}-{last}").for_task(CHIEF)
    assert first < meeting_point(spec, 1, CPU, LAUNCHED).port <= last


def test_without_a_range_the_kernel_chooses_and_the_others_are_told() -> None:
    spec = ClusterSpec(worker_hosts=(f"127.0.0.1:{free_port()}",)).for_task(CHIEF)
    assert meeting_point(spec, 1, CPU, LAUNCHED).port == 0
