"""A server of a library job: its life, and where it keeps and updates its parameters: its CPU with all its cores, or a
GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import BadInput
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.garbage import spared_collector
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.outcome import JobEndedError, Outcome
from lockstep.terminal import say

if TYPE_CHECKING:
    import torch

    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.task.node_config import NodeConfig
    from lockstep.runtime.task.signals import TaskSignals
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
    wire, helpers, alone = WireFormat(serving.wire_dtype), fitting_helpers(cluster), not cluster.server_replicas
    return TorchShardStore(device, wire, helpers, stays_on_gpu=alone)


def _gpu_of(cluster: ClusterSpec) -> torch.device:
    """The servers of a host take its GPUs in turn, from the first on, as its workers do: each is near a worker."""
    import torch

    from lockstep.library.devices import place_on_host

    device = torch.device("cuda", place_on_host(cluster) % torch.cuda.device_count())
    torch.cuda.set_device(device)  # of this thread; otherwise pinning memory would occupy the first GPU too
    return device


def serve(config: NodeConfig, serving: StoreChoice, reporter: TaskReporter, signals: TaskSignals) -> Outcome:
    """Run one server of a job, from its start to its end."""
    from lockstep.runtime.task.server_node import ServerNode

    node = ServerNode(config, lambda: make_store(serving, config.cluster), say, reporter)
    signals.attach(node)
    try:
        node.start()
        from lockstep.training.server.named_optimizer import warm_up

        warm_up()  # while the cluster forms

        node.wait_until_member()
        with spared_collector():
            outcome = node.wait_until_ended()
        if outcome.again:
            return outcome
        node.see_others_off()
        return dataclasses.replace(outcome, unsaved=node.tell_unsaved())
    except JobEndedError as ended:
        return ended.outcome
    except BaseException as error:
        if node.outcome is None:
            node.fail(failure_of(error, f"was ended by {type(error).__name__}"))
        raise
    finally:
        for line in dropped_lines(node.machine.coordinator):
            say(line)
        node.close()


def dropped_lines(coordinator: object) -> list[str]:
    """Backup workers: which worker's gradients were left out, and how often."""
    dropped: Mapping[TaskId, int] = getattr(coordinator, "dropped", {})
    return [f"{task} was left out of {count} steps (backup workers)" for task, count in sorted(dropped.items())]
