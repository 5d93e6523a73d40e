"""A worker that is started again after it had finished does not wait for a job that is over."""

from __future__ import annotations

import time

from helpers.ports import free_ports
from lockstep.protocol.core.ids import worker
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode


def ending_of(*, finished: bool, startup_timeout: float) -> tuple[bool, list[str]]:
    """How a worker ends whose cluster is gone, and what it printed."""
    ps, own = (f"127.0.0.1:{port}" for port in free_ports(2))
    spec = ClusterSpec(ps_hosts=(ps,), worker_hosts=(own,), protocol="grpc", startup_timeout=startup_timeout)
    said: list[str] = []
    config = NodeConfig(cluster=spec.for_task(worker(0)), settings=(), finished=finished)
    node = WorkerNode(config, said.append, TaskReporter.none())
    try:
        node.start()
        node.wait_until_member()
    except JobEndedError as ended:
        return ended.outcome.ok, said
    finally:
        node.close()
    raise AssertionError("it became a member of nothing")


def test_a_worker_that_had_finished_before_ends_well_where_no_other_task_is_left() -> None:
    began = time.monotonic()
    ok, said = ending_of(finished=True, startup_timeout=60.0)
    assert ok
    assert time.monotonic() - began < 20
    assert any("had finished its work in its earlier incarnation, and the job is over" in one for one in said)


def test_a_worker_that_had_not_finished_waits_for_the_others() -> None:
    ok, _ = ending_of(finished=False, startup_timeout=1.5)
    assert not ok
