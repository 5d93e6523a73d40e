"""A local cluster of small tasks for tests, run as a program with one argument, the JSON of a ``Plan``."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.local_cluster.cluster import LocalClusterSpec, run_local_cluster
from lockstep.runtime.monitor.python_command import python_command
from lockstep.runtime.monitor.spares import SparePlan
from lockstep.runtime.monitor.task_process import REPORT_FD

RESTARTS_VARIABLE = "SMALL_RESTARTS"
MONITOR = str(Path(__file__).with_name("small_monitor.py"))


@dataclass
class Plan:
    """What each task does (``{"worker 0": ["say=hello"]}``), and the settings of the launcher."""

    script: str
    tasks: dict[str, list[str]]
    logs: str = ""
    show_all: bool = False
    end_seconds: float = 10.0
    finish_seconds: float = 60.0
    linger: float = 3.0
    restarts: int = 0
    spares: int = 0
    stolen_ports: int = 0
    """In this many first attempts, another process listens on worker 0's port."""
    stolen: list[socket.socket] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if name != "stolen"})

    def command(self, task: TaskId, ps_hosts: Sequence[str], worker_hosts: Sequence[str]) -> list[str]:
        hosts = worker_hosts if task.role.value == "worker" else ps_hosts
        port = hosts[task.index].rpartition(":")[2]
        if task.short == "worker 0" and len(self.stolen) < self.stolen_ports:
            self.stolen.append(socket.create_server(("127.0.0.1", int(port))))
        monitor = [sys.executable, MONITOR, str(task), port, str(self.linger), "5"]
        return [*monitor, *self.program(), REPORT_FD, *self.tasks[task.short]]

    def program(self) -> list[str]:
        return [sys.executable, self.script]

    def spare_plan(self) -> SparePlan | None:
        program = python_command(self.program())
        assert program is not None
        return SparePlan(count=self.spares, program=program, loads="json:dumps") if self.spares else None


def main() -> int:
    plan = Plan(**json.loads(sys.argv[1]))
    spec = LocalClusterSpec(
        servers=sum(name.startswith("ps") for name in plan.tasks),
        workers=sum(name.startswith("worker") for name in plan.tasks),
        command=plan.command,
        logs=Path(plan.logs) if plan.logs else None,
        show_all=plan.show_all,
        end_seconds=plan.end_seconds,
        finish_seconds=plan.finish_seconds,
        spares=plan.spare_plan(),
    )
    os.environ[RESTARTS_VARIABLE] = str(plan.restarts)
    return run_local_cluster(spec)


if __name__ == "__main__":
    sys.exit(main())
