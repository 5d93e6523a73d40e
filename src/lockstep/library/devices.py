"""Which of its host's devices is a task's own."""

from __future__ import annotations

import torch

from lockstep.runtime.startup.cluster import ClusterSpec


def place_on_host(cluster: ClusterSpec) -> int:
    """How many tasks of this one's role with lower numbers are on its host, judging by their addresses."""
    assert cluster.task is not None
    own = cluster.address_of(cluster.task).rpartition(":")[0]
    before = cluster.hosts_of(cluster.task.role)[: cluster.task.index]
    return sum(address.rpartition(":")[0] == own for address in before)


def own_device(cluster: ClusterSpec) -> torch.device:
    """The GPU of this worker's place on its host; with more workers than GPUs they share them in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", place_on_host(cluster) % torch.cuda.device_count())
