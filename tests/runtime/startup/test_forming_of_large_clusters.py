"""While a large cluster starts, all tasks are busy: the number of their queries must not grow with its square."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from helpers.ports import free_ports
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.protocol.core.timing import ASK_AFTER_SECONDS
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.discovery import ask_after
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.watch.status import STEPS_TO_KNOW
from lockstep.runtime.watch.watchdog import WatchSettings

LARGE = ClusterShape(2, 12)
SMALL = ClusterShape(1, 2)


@contextmanager
def lonely_worker(shape: ClusterShape) -> Iterator[WorkerNode]:
    """Worker 1 of a cluster in which nothing else was started."""
    hosts = [f"127.0.0.1:{port}" for port in free_ports(len(shape.tasks()))]
    spec = ClusterSpec(ps_hosts=tuple(hosts[: shape.servers]), worker_hosts=tuple(hosts[shape.servers :]))
    config = NodeConfig(cluster=spec.for_task(worker(1)), settings=(), watch=WatchSettings(ask=0.2))
    with closing(WorkerNode(config, lambda _: None, TaskReporter.none())) as node:
        yield node


def asked_by(node: WorkerNode) -> set[str]:
    """The tasks that the watchdog of a node asks."""
    return set(node.watchdog.evidence().tasks)


def names(*tasks: TaskId) -> set[str]:
    return {str(task) for task in tasks}


def test_a_worker_of_a_large_cluster_asks_its_servers_only_while_the_cluster_forms() -> None:
    with lonely_worker(LARGE) as node:
        assert asked_by(node) == names(worker(1), server(0), server(1))


def test_in_the_first_steps_of_a_large_cluster_it_still_asks_its_servers_only() -> None:
    with lonely_worker(LARGE) as node:
        node._member.set()
        assert not node.forming
        assert asked_by(node) == names(worker(1), server(0), server(1))
        steps = STEPS_TO_KNOW + 1
        node.sampler._step_ends.extend((step, float(step)) for step in range(steps))
        assert asked_by(node) == names(*LARGE.tasks())


def test_a_worker_of_a_small_cluster_asks_all_others() -> None:
    with lonely_worker(SMALL) as node:
        assert asked_by(node) == names(*SMALL.tasks())


def test_tasks_of_a_large_cluster_have_longer_before_they_are_asked_why_they_do_not_join() -> None:
    assert ask_after(len(SMALL.tasks())) == ASK_AFTER_SECONDS
    assert ask_after(40) == 10.0
