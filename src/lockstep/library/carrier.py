"""What carries the gradients of ranks, and the node of a worker that goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.library.settings import OWN, TORCH
from lockstep.terminal import say

if TYPE_CHECKING:
    from lockstep.library.training_way import JobOptions
    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.task.collective_node import CollectiveNode
    from lockstep.runtime.task.node_config import NodeConfig
    from lockstep.runtime.task.worker_node import WorkerNode


def carrier_of(backend: str | None) -> str:
    """What carries the gradients of ranks: torch.distributed where there are GPUs, our own transports between CPUs.

    Every rank must choose the same, before its model exists.
    """
    if backend is not None:
        return OWN if backend == OWN else TORCH
    import torch

    return TORCH if torch.cuda.is_available() else OWN


def make_node(
    config: NodeConfig, reporter: TaskReporter, carrier: str, options: JobOptions
) -> WorkerNode | CollectiveNode:
    """Only what this one needs is imported. ``carrier``: empty where servers hold the parameters."""
    save_slot = options.save_slot
    if not carrier:
        from lockstep.runtime.task.worker_node import WorkerNode

        return WorkerNode(config, say, reporter)
    if carrier == OWN:
        from lockstep.runtime.task.worker_node import WorkerNode
        from lockstep.training.server.mean_store import MeanStore, OwnGradients
        from lockstep.training.wire_format import WireFormat

        wire = WireFormat(options.wire_dtype)

        def make_store() -> MeanStore:
            assert rank.means is not None
            # Of ranks that come back, gradients stay what they are until all have their means; in 16 bits they are not
            # where the program looks for the means.
            stays = rank.rules.ranks_return or wire.narrows
            own = None if stays else OwnGradients(rank.task, rank.means.replaced_here)
            return MeanStore(wire, save=save_slot, answer=save_slot.answer, own=own)

        rank = WorkerNode(config, say, reporter, make_store)
        rank.on_save = save_slot.expect
        return rank
    from lockstep.runtime.task.collective_node import CollectiveNode

    node = CollectiveNode(config, say, reporter)
    node.save_with(save_slot)
    return node
