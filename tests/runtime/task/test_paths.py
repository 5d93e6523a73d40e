"""Which path a cluster's tensors take: in place where memory is shared, reported in one line per link, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from helpers.cluster import InProcessCluster, in_process_cluster
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.messages import GroupRates, OptimizerEntry
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.trace.traffic import Traffic, in_words
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.replica import Replica, Trained
from lockstep.transports.base import Counters, NoPathError
from lockstep.transports.shm import transport as shm

STEPS = 4
RATES = (GroupRates(("lr",), (0.1,)),)
ENTRY = (OptimizerEntry("SGD", json.dumps({"lr": 0.1})),)


def train(node: WorkerNode) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
    node.wait_until_member()
    trained = [Trained(name, parameter, 0) for name, parameter in model.named_parameters()]
    replica = Replica(node, trained, ENTRY, 4096, own_copy=False)
    replica.start()
    for step in range(STEPS):
        replica.begin(step, RATES)
        model(torch.ones(2, 40)).sum().backward()
        replica.end()
    replica.close()
    node.finish(STEPS)


def run(protocol: str) -> InProcessCluster:
    with in_process_cluster(ClusterShape(1, 2), TorchShardStore, protocol=protocol, tell_paths=True) as cluster:
        cluster.run(train)
    return cluster


@pytest.mark.parametrize("protocol", ["grpc+shm", "auto"])
def test_over_shared_memory_nothing_is_copied_in_either_direction(protocol: str) -> None:
    cluster = run(protocol)
    for worker in cluster.workers:
        (line,) = worker.traffic.lines()
        assert line.startswith("over grpc+shm: ")
        assert " 0 writes " in line


def test_over_grpc_parameters_are_written() -> None:
    cluster = run("grpc")
    for worker in cluster.workers:
        (line,) = worker.traffic.lines()
        assert line.startswith("over grpc: ")
        assert " 0 writes " not in line


def test_each_link_reports_its_path_and_each_worker_its_total() -> None:
    said = run("auto").said
    assert said.count("worker 0 to ps 0: shared memory") == 1
    assert said.count("worker 1 to ps 0: shared memory") == 1
    assert sum("tensors in 0 writes" in line for line in said) == 2


def test_auto_reports_why_a_path_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(task: str, ours: object, theirs: object) -> None:
        raise NoPathError(f"{task} runs on another host (b, this is a)")

    monkeypatch.setattr(shm, "check_same_host", far)
    said = run("auto").said
    lines = [line for line in said if line.startswith("worker 0 to ps 0: ")]
    assert len(lines) == 1
    assert lines[0].startswith("worker 0 to ps 0: TCP to 127.0.0.1:")
    assert lines[0].endswith("(not grpc+shm: /job:ps/replica:0/task:0 runs on another host (b, this is a))")


def test_a_transport_that_was_asked_for_and_is_not_available_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(task: str, ours: object, theirs: object) -> None:
        raise NoPathError(f"{task} runs on another host (b, this is a)")

    monkeypatch.setattr(shm, "check_same_host", far)
    with in_process_cluster(ClusterShape(1, 1), TorchShardStore, protocol="grpc+shm") as cluster:
        with pytest.raises(JobEndedError, match=r"cannot use --server_protocol=grpc\+shm with .*on another host"):
            cluster.workers[0].wait_until_member()
        assert cluster.workers[0].refused


def test_totals_are_summed_by_path_and_shown_with_units() -> None:
    traffic = Traffic()
    traffic.add("grpc", Counters(1_000_000, 2, 3_000, 1, 0, 0), 7)
    traffic.add("grpc", Counters(500_000, 1, 0, 0, 1, 0), 3)
    traffic.add("grpc+shm", Counters(), 0)
    assert traffic.lines() == ["over grpc: sent 1.5 MB, received 3 KB, 10 tensors in 4 writes and 1 loans"]
    assert in_words(12) == "12 B"
    assert in_words(2_500_000_000) == "2.5 GB"
