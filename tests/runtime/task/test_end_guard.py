"""Workers that hang, with real nodes in this process: they leave with their job, and hold nobody meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from helpers.cluster import in_process_cluster
from helpers.waiting import wait_until
from lockstep.drill.task import PlainStore, TaskPlan, train
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.faults import BlockCallback, Callback
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime import phrases
from lockstep.runtime.task import injection
from lockstep.runtime.task import node as node_module
from lockstep.runtime.task.node import Node
from lockstep.runtime.task.outcome import JobEndedError, Outcome
from lockstep.runtime.task.worker_node import WorkerNode

SHAPE = ClusterShape(servers=1, workers=2)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "FORCE_SECONDS", 0.5)


def _joined(nodes: list[Node]) -> None:
    for node in nodes:
        node.wait_until_member()


def test_a_worker_that_hangs_while_the_job_fails_is_ended_by_force() -> None:
    forced: list[Outcome] = []
    with in_process_cluster(SHAPE, PlainStore, give_up=forced.append) as cluster:
        _joined(cluster.nodes())
        first, second = cluster.workers
        first.fail(own_error("broken"))
        line = phrases.does_not_return(second.task, second.main.doing)
        wait_until(lambda: line in cluster.said, 20, "worker 1 is ended by force")
        assert {outcome.culprit for outcome in forced} <= {str(first.task)}
        assert (second.reporter.report.over, second.reporter.report.must_leave) == (True, True)


def test_workers_that_notice_the_end_are_not() -> None:
    forced: list[Outcome] = []
    with in_process_cluster(SHAPE, PlainStore, give_up=forced.append) as cluster:
        _joined(cluster.nodes())
        threads = [threading.Thread(target=_wait_for_the_end, args=(node,)) for node in cluster.nodes()[::2]]
        for thread in threads:
            thread.start()
        cluster.workers[0].fail(own_error("broken"))
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        wait_until(lambda: not any(t.name == "see to the end" for t in threading.enumerate()), 10, "no guard is left")
        assert forced == []


def _wait_for_the_end(node: Node) -> None:
    assert not node.wait_until_ended().ok


@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_in_asynchronous_mode_a_worker_that_hangs_while_it_receives_does_not_hold_the_other(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over shared memory it had: the receiver copies, and what it has not copied held the server's slot."""
    steps, goes_on = 30, threading.Event()
    monkeypatch.setattr(injection, "_blocking_copy", goes_on.wait)
    blocks = BlockCallback(str(worker(1)), str(server(0)), Callback.TENSOR, 3)
    plan = TaskPlan(
        task="", ps_hosts=("",), worker_hosts=("", ""), folder=str(tmp_path), steps=steps, step_seconds=0.001
    )
    with in_process_cluster(SHAPE, PlainStore, synchronous=False, protocol=protocol, faults=(blocks,)) as cluster:
        threads = [threading.Thread(target=_train, args=(node, plan), daemon=True) for node in cluster.workers]
        for thread in threads:
            thread.start()
        first, second = cluster.workers
        try:
            done = "worker 0 has done all its steps"
            wait_until(lambda: first.plan is not None and first.has_version(steps), 20, done)
            assert not second.has_version(steps)
        finally:
            goes_on.set()
            first.fail(own_error("enough"))
        for thread in threads:
            thread.join(20)


def _train(node: WorkerNode, plan: TaskPlan) -> None:
    try:
        train(node, plan)
    except JobEndedError:
        return
