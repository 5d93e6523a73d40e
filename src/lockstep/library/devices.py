"""Which device is a worker's own, and what carries the gradients of ranks whose models are there."""

from __future__ import annotations

import torch

from lockstep.protocol.core.ids import Role
from lockstep.runtime.startup.cluster import ClusterSpec


def place_on_host(cluster: ClusterSpec) -> int:
    """How many workers before this one are on its host; servers do not count, because they need no GPU of their own."""
    assert cluster.task is not None
    own = cluster.address_of(cluster.task).rpartition(":")[0]
    before = cluster.worker_hosts[: cluster.task.index] if cluster.task.role is Role.WORKER else ()
    return sum(address.rpartition(":")[0] == own for address in before)


def own_device(cluster: ClusterSpec) -> torch.device:
    """The GPU of this worker's place on its host; with more workers than GPUs they share them in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", place_on_host(cluster) % torch.cuda.device_count())
