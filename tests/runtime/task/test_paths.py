"""Which path a cluster's tensors take: in place where memory is shared, reported in one line per link, or refused."""

from __future__ import annotations

import json
import threading

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
SEEDED = threading.Lock()
"""The workers of a test are threads, and the seed is one for all."""
RATES = (GroupRates(("lr",), (0.1,)),)
ENTRY = (OptimizerEntry("SGD", json.dumps({"lr": 0.1})),)


def train(node: WorkerNode) -> bytes:
    """The parameters at the end."""
    with SEEDED:
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
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def run(protocol: str, *, private: bool = False, ended: list[bytes] | None = None) -> InProcessCluster:
    shape, kept = ClusterShape(1, 2), [] if ended is None else ended
    with in_process_cluster(
        shape, TorchShardStore, protocol=protocol, require_private=private, tell_paths=True
    ) as cluster:
        cluster.run(lambda node: kept.append(train(node)))
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


def test_between_hosts_private_tensors_take_encrypted_tcp_and_the_bits_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def far(task: str, ours: object, theirs: object) -> None:
        raise NoPathError(f"{task} runs on another host (b, this is a)")

    shared: list[bytes] = []
    run("auto", ended=shared)
    monkeypatch.setattr(shm, "check_same_host", far)
    ended: list[bytes] = []
    cluster = run("auto", private=True, ended=ended)
    lines = [line for line in cluster.said if " to ps 0: " in line]
    assert len(lines) == 2
    assert all(" to ps 0: encrypted TCP to 127.0.0.1:" in line for line in lines)
    assert all(line.startswith("over grpc+tcp: ") for worker in cluster.workers for line in worker.traffic.lines())
    assert len({*ended, *shared}) == 1


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
