"""What carries the gradients of a job in which every rank trains."""

from __future__ import annotations

import functools

import torch

from lockstep.library.errors import UsageError
from lockstep.library.meeting import port_for_store
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import JobId
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.ranks.averager import Averager
from lockstep.training.ranks.group import STORE_SECONDS, MeetingPoint, WorkerGroup
from lockstep.training.ranks.layout import RankLayout
from lockstep.training.ranks.own_averager import OwnAverager
from lockstep.training.ranks.torch_averager import TorchAverager
from lockstep.training.wire_format import WireFormat
from lockstep.transports.control.addresses import parse_address


def make_averager(
    node: WorkerNode | CollectiveNode,
    layout: RankLayout,
    device: torch.device,
    options: JobOptions,
    untrained: tuple[Setting, ...],
) -> Averager:
    """Our own transports if the node has a share of the buckets; otherwise NCCL if every rank has a GPU of its own, or
    gloo. ``untrained``: digests of what is not trained, which must be the chief's."""
    if isinstance(node, WorkerNode):
        if device.type != "cpu":
            raise UsageError(
                f"the model is on {device}, but this job's gradients travel between CPUs (backend='own'); give "
                "lockstep.join(backend='nccl') or 'gloo', the same on every rank"
            )
        return OwnAverager(node, layout, untrained, WireFormat(options.wire_dtype))
    group = WorkerGroup(meeting_point(node.cluster, node.job, device, options), node)
    return TorchAverager(group, layout, device, untrained)


def meeting_point(cluster: ClusterSpec, job: JobId, device: torch.device, options: JobOptions) -> MeetingPoint:
    """Where the ranks meet if torch.distributed carries their gradients."""
    assert cluster.task is not None
    hosts = [parse_address(address).host for address in cluster.worker_hosts]
    own = hosts[cluster.task.index]
    wanted = options.backend or ("nccl" if device.type == "cuda" else "gloo")
    return MeetingPoint(
        rank=cluster.task.index,
        size=len(hosts),
        host=hosts[0],
        own_host=own,
        listen_host=cluster.listen_address().host,
        port=_agreed_port(cluster) if options.find_store is None else port_for_store(cluster),
        patience=max(STORE_SECONDS, cluster.startup_timeout),
        backend=wanted,
        device=f"{own} {device}",
        find=None if options.find_store is None else functools.partial(options.find_store, job),
    )


def _agreed_port(cluster: ClusterSpec) -> int:
    """Where worker 0 keeps its store: the last of ``ports``, or the first after its own that the list gives nobody."""
    if cluster.second_ports is not None:
        return cluster.second_ports.agreed
    listed = [parse_address(address).port for address in cluster.worker_hosts]
    return next(port for port in range(listed[0] + 1, listed[0] + 2 + len(listed)) if port not in listed)
