"""A whole cluster inside one process: real nodes, real sockets, one thread per training loop."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from helpers.ports import free_ports
from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.core.faults import Fault
from lockstep.protocol.core.ids import ClusterShape, TaskId
from lockstep.protocol.core.messages import Description, Setting
from lockstep.runtime.checkpoint.resuming import beginning_in
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.end_guard import GiveUp
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.node import Node
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.server_node import MakeStore, ServerNode
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.monitor_service import add_monitor_service
from lockstep.transports.control.server import ControlServer
from lockstep.version import __version__

JOIN_SECONDS = 30.0


class Front:
    """Stands in for the monitor of a task without its own process."""

    def __init__(self, task: TaskId, address: str, reporter: TaskReporter) -> None:
        host, port = address.rsplit(":", 1)
        self._task = task
        self._reporter = reporter
        self._changed = Broadcast()
        self._server = ControlServer(host, int(port), threads=24)
        add_monitor_service(self._server, self._describe, self._changed, lambda: b"{}", max_watchers=8)
        self._server.start()

    def _describe(self) -> Description:
        report = self._reporter.report
        return Description(
            task=str(self._task),
            host=socket.gethostname(),
            monitor_pid=os.getpid(),
            pid=os.getpid(),
            incarnation=report.incarnation,
            phase=report.phase,
            phase_seconds=0.0,
            task_address=report.task_address,
            exited=False,
            exit_code=0,
            version=__version__,
            job=report.job,
        )

    def close(self) -> None:
        self._changed.close()
        self._server.stop(0.1)


@dataclass
class InProcessCluster:
    """The nodes of one cluster; ``said`` collects what they would print."""

    servers: list[ServerNode] = field(default_factory=list)
    workers: list[WorkerNode] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        return [*self.servers, *self.workers]

    def run(self, train: Callable[[WorkerNode], None]) -> None:
        """Run ``train`` for every worker, each on its own thread; raise what the first of them raised."""
        errors: list[BaseException] = []

        def guarded(node: WorkerNode) -> None:
            try:
                train(node)
            except BaseException as error:  # noqa: BLE001 - raised again on the test's own thread
                errors.append(error)
                node.fail(failure_of(error))

        threads = [
            threading.Thread(target=guarded, args=(node,), name=f"train {node.task.short}") for node in self.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_SECONDS)
            assert not thread.is_alive(), f"{thread.name} did not end"
        if errors:  # the others may learn that the job is over before the one that ended it gets here
            raise next((error for error in errors if not isinstance(error, JobEndedError)), errors[0])


@contextmanager
def in_process_cluster(
    shape: ClusterShape,
    make_store: MakeStore,
    *,
    synchronous: bool = True,
    eager: bool = True,
    summed: bool = False,
    aggregate: int | None = None,
    protocol: str = "grpc",
    require_private: bool = False,
    settings: Callable[[TaskId], tuple[Setting, ...]] = lambda _: (),
    startup_timeout: float = 30.0,
    stall_after: float = 60.0,
    user_code_timeout: float = 600.0,
    run_folder: str = "",
    watch: WatchSettings | None = None,
    faults: tuple[Fault, ...] = (),
    tell_paths: bool = False,
    recovery: RecoveryRules | None = None,
    train_dir: str = "",
    give_up: GiveUp | None = None,
) -> Iterator[InProcessCluster]:
    """Start all nodes of a cluster (without servers: ranks); close them whatever happens."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(shape.servers + shape.workers)]
    spec = ClusterSpec(
        ps_hosts=tuple(ports[: shape.servers]),
        worker_hosts=tuple(ports[shape.servers :]),
        protocol=protocol,
        require_private=require_private,
        startup_timeout=startup_timeout,
        stall_after=stall_after,
        user_code_timeout=user_code_timeout,
    )
    cluster = InProcessCluster()
    beginning = beginning_in(train_dir, settings(shape.coordinator), cluster.said.append) if train_dir else Beginning()
    fronts: list[Front] = []
    try:
        for task in shape.tasks():
            config = NodeConfig(
                cluster=spec.for_task(task),
                settings=settings(task),
                synchronous=synchronous,
                eager=eager,
                summed=summed,
                aggregate=aggregate,
                run_folder=run_folder,
                watch=watch or WatchSettings(),
                faults=faults,
                tell_paths=tell_paths,
                recovery=recovery or RecoveryRules(),
                train_dir=train_dir,
                give_up=give_up,
                checkpoints_kept=0,
                beginning=beginning if task == shape.coordinator else Beginning(),
            )
            reporter = TaskReporter.none()
            fronts.append(Front(task, spec.address_of(task), reporter))
            if not shape.servers:
                cluster.workers.append(WorkerNode(config, cluster.said.append, reporter, make_store))
            elif task in shape.server_ids():
                cluster.servers.append(ServerNode(config, make_store, cluster.said.append, reporter))
            else:
                cluster.workers.append(WorkerNode(config, cluster.said.append, reporter))
        for node in cluster.nodes():
            node.start()
        yield cluster
    finally:
        for node in cluster.nodes() if shape.servers else reversed(cluster.nodes()):  # rank 0 sees the others off
            node.close()
        for front in fronts:
            front.close()
