"""Clusters of real processes without torch on this machine's loopback address."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.ports import free_ports
from helpers.programs import Program
from lockstep.protocol.core.ids import ClusterShape, TaskId

PLAIN = (sys.executable, str(Path(__file__).parents[1] / "helpers" / "plain_lockstep.py"))
SOURCES = str(Path(__file__).parents[2] / "src")


@dataclass
class PlainCluster:
    """The addresses of a cluster, and the tasks started so far."""

    shape: ClusterShape
    addresses: dict[TaskId, str]
    programs: dict[TaskId, Program] = field(default_factory=dict)

    def flags(self, task: TaskId | None) -> list[str]:
        servers = ",".join(self.addresses[one] for one in self.shape.server_ids())
        workers = ",".join(self.addresses[one] for one in self.shape.worker_ids())
        named = [] if task is None else [f"--job_name={task.role.value}", f"--task_index={task.index}"]
        return [f"--ps_hosts={servers}", f"--worker_hosts={workers}", "--device=cpu", "--server_protocol=grpc", *named]

    def start(self, task: TaskId, *more: str, hold: bool = False) -> Program:
        """Start one task the way a user does."""
        environment = {"PYTHONPATH": SOURCES, **({"PLAIN_HOLD": "1"} if hold else {})}
        self.programs[task] = Program([*PLAIN, "bench", *self.flags(task), *more], environment)
        return self.programs[task]

    def doctor(self, task: TaskId | None, *more: str) -> Program:
        """``lockstep doctor`` for a task, or for all tasks of this machine; use it in a ``with`` block."""
        return Program([*PLAIN, "doctor", *self.flags(task), *more], {"PYTHONPATH": SOURCES})


@contextlib.contextmanager
def plain_cluster(servers: int, workers: int) -> Iterator[PlainCluster]:
    """A cluster whose tasks the test starts; anything still running at the end is killed."""
    shape = ClusterShape(servers, workers)
    ports = free_ports(servers + workers)
    cluster = PlainCluster(shape, {task: f"127.0.0.1:{port}" for task, port in zip(shape.tasks(), ports, strict=True)})
    try:
        yield cluster
    finally:
        for program in cluster.programs.values():
            program.close()
