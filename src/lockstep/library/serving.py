"""Where a server of a library job keeps and updates its parameters: its CPU with all its cores, or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import BadInput
from lockstep.runtime.startup.cluster import ClusterSpec

if TYPE_CHECKING:
    import torch

    from lockstep.runtime.task.store import ShardStore

SERVER_DEVICES = ("cpu", "gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreChoice:
    """What a server needs to know besides its node's configuration."""

    device: str = "cpu"
    wire_dtype: str = "float32"


def refuse_missing_gpu(serving: StoreChoice) -> None:
    """BadInput if a GPU was asked for and there is none. Imports torch only if one was asked for."""
    if serving.device != "gpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise BadInput(
            "device='gpu' was asked for, but torch sees no GPU on this server's host; omit it, and the server updates "
            "its parameters on its CPU."
        )


def make_store(serving: StoreChoice, cluster: ClusterSpec) -> ShardStore:
    """The store of this process's server. Called on the store's thread, which uses it from then on."""
    from lockstep.training.server.piece_pool import fitting_helpers, use_own_threads
    from lockstep.training.server.shard_store import TorchShardStore
    from lockstep.training.wire_format import WireFormat

    use_own_threads()
    device = _gpu_of(cluster) if serving.device == "gpu" else None
    return TorchShardStore(device, WireFormat(serving.wire_dtype), fitting_helpers(cluster))


def _gpu_of(cluster: ClusterSpec) -> torch.device:
    """The servers of a host take its GPUs in turn, from the first on, as its workers do: each is near a worker."""
    import torch

    device = torch.device("cuda", place_on_host(cluster) % torch.cuda.device_count())
    torch.cuda.set_device(device)  # of this thread; otherwise pinning memory would occupy the first GPU too
    return device


def place_on_host(cluster: ClusterSpec) -> int:
    """How many servers with lower numbers are on this server's host, judging by their addresses."""
    assert cluster.task is not None
    own = cluster.address_of(cluster.task).rpartition(":")[0]
    before = cluster.hosts_of(cluster.task.role)[: cluster.task.index]
    return sum(address.rpartition(":")[0] == own for address in before)
