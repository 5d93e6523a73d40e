"""Several ranks as threads of one process: their nodes, and what averages between them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from unittest.mock import patch

import torch

from helpers.cluster import Front
from helpers.ports import free_ports
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import worker
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.training.ranks.connections import Connections
from lockstep.training.ranks.group import MeetingPoint, WorkerGroup
from lockstep.training.ranks.layout import RankLayout, lay_out
from lockstep.training.ranks.listening import serve_store
from lockstep.training.ranks.rank_replica import RankReplica
from lockstep.training.ranks.torch_averager import TorchAverager
from lockstep.training.worker.binding import Trained

SECONDS = 60.0

# What the first store of torch.distributed opens for the whole process is nothing that a test left behind.
serve_store("127.0.0.1", 0, 1, SECONDS)


class ThreadRank:
    """One rank: its node, and whatever its body makes of it."""

    def __init__(self, number: int, hosts: tuple[str, ...], port: int) -> None:
        self.number = number
        self.size = size = len(hosts)
        spec = ClusterSpec(worker_hosts=hosts, task=worker(number), has_servers=False)
        self.said: list[str] = []
        reporter = TaskReporter.none()
        self._front = Front(worker(number), hosts[number], reporter)
        self.node = CollectiveNode(NodeConfig(cluster=spec, settings=()), self.said.append, reporter)
        self.node.start()
        self._averagers: list[TorchAverager] = []
        self._meeting = MeetingPoint(number, size, "127.0.0.1", "127.0.0.1", "127.0.0.1", port, SECONDS, "gloo")

    def layout(self, model: torch.nn.Module, bucket_bytes: int = 2048) -> RankLayout:
        trained = [Trained(name, p, 0) for name, p in model.named_parameters() if p.requires_grad]
        return lay_out(trained, list(model.buffers()), 1, bucket_bytes)

    def replica(self, model: torch.nn.Module, **options: Callable[..., object]) -> RankReplica:
        layout = self.layout(model)
        averager = TorchAverager(WorkerGroup(self._meeting, self.node), layout, torch.device("cpu"))
        self._averagers.append(averager)
        made = RankReplica(averager, layout, **options)  # type: ignore[arg-type]
        made.start()
        return made

    def close(self) -> None:
        for averager in self._averagers:
            averager.close()
        self.node.close()
        self._front.close()


@patch.object(Connections, "cut", lambda _self: None)  # one rank's are the others' too: they share this process
def run_ranks(size: int, body: Callable[[ThreadRank], None]) -> list[ThreadRank]:
    """Run ``body`` as every rank's program; raises what the first of them raised."""
    *ports, store = free_ports(size + 1)
    hosts = tuple(f"127.0.0.1:{port}" for port in ports)
    ranks = [ThreadRank(number, hosts, store) for number in range(size)]
    errors: list[BaseException] = []

    def run(rank: ThreadRank) -> None:
        try:
            rank.node.wait_until_member()
            body(rank)
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error.with_traceback(None))  # its frames would keep what the rank has opened
            rank.node.fail(own_error("a test's rank has failed"))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    alive = [thread for thread in threads if thread.is_alive()]
    for rank in reversed(ranks):  # rank 0 sees the others off
        rank.close()
    gc.collect()  # groups and stores, which hooks keep in circles
    assert not alive, "a rank does not end"
    if errors:
        raise errors[0]
    return ranks
