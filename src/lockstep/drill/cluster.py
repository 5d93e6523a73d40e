"""The cluster of a drill: monitors started one by one, each on its own port, so that any can be left out or hit."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.drill.task import TaskPlan
from lockstep.protocol.core.ids import ClusterShape, Role, TaskId
from lockstep.runtime import processes
from lockstep.runtime.local_cluster.cluster import ReservedPort
from lockstep.transports.control.monitor_client import Unreachable, describe

MONITOR_FLAG = "--lockstep_monitor="
TASK_FLAG = "--lockstep_task="


def monitor_command(plan: TaskPlan, bind: str = "") -> list[str]:
    """The command line of one monitor."""
    return [sys.executable, "-m", "lockstep", "drill", f"{MONITOR_FLAG}{bind}", plan.to_text()]


class DrillCluster:
    """All tasks of one drill. After the ``with`` block none of them is left."""

    def __init__(self, shape: ClusterShape, folder: Path, hosts: Mapping[TaskId, Sequence[str]] | None = None) -> None:
        """``hosts``: for each task the address of its own host, and how to run a command there."""
        self.shape = shape
        self.folder = folder
        self._hosts = hosts or {}
        self._ports = {} if hosts else {task: ReservedPort() for task in shape.tasks()}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._at: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def address(self, task: TaskId) -> str:
        if self._hosts:
            return f"{self._hosts[task][0]}:4000"
        return self._ports[task].address

    def plan(self, task: TaskId, **changes: object) -> TaskPlan:
        """The plan of one task of this cluster."""
        plan = TaskPlan(
            task=str(task),
            ps_hosts=tuple(self.address(t) for t in self.shape.server_ids()),
            worker_hosts=tuple(self.address(t) for t in self.shape.worker_ids()),
            folder=str(self.folder),
        )
        return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]  # callers pass what fits the field

    def start(self, plan: TaskPlan, log: str = "", environment: Mapping[str, str] | None = None) -> int:
        """Start the monitor of a task; returns its place in the list of processes."""
        prefix = list(self._hosts[plan.id][1:]) if self._hosts else []
        if environment:
            prefix += ["env", *(f"{name}={value}" for name, value in environment.items())]
        path = self.folder / "logs" / (log or f"{plan.id.role.value}-{plan.id.index}.log")
        with path.open("ab") as output:
            process = subprocess.Popen(
                processes.dies_with_this_process([*prefix, *monitor_command(plan)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        hosts = plan.ps_hosts if plan.id.role is Role.SERVER else plan.worker_hosts
        self._at[hosts[plan.id.index]] = process
        return len(self._processes) - 1

    def task_pid(self, task: TaskId, seconds: float = 5.0) -> int:
        """The process of a task, from its monitor; 0 if that does not answer in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if pid := describe(self.address(task), 1.0).pid:
                    return pid
            except Unreachable:
                time.sleep(0.05)
        return 0

    def wait_until_it_listens(self, task: TaskId, seconds: float, at: str = "") -> None:
        """Wait until the task itself (not only its monitor) can be reached, or has already ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                found = describe(at or self.address(task), 1.0)
                if found.task_address or found.exited:
                    return
            except Unreachable:
                there = self._at.get(at or self.address(task))
                if there is not None and there.poll() is not None:
                    return
            time.sleep(0.02)

    def kill_monitor(self, place: int) -> None:
        """SIGKILL a monitor; its reaper ends the task."""
        self._processes[place].kill()
        self._processes[place].wait()

    def signal_all(self, place: int, number: int) -> None:
        """Send a signal to a monitor and to everything below it."""
        top = self._processes[place].pid
        for pid in (top, *(below.pid for below in processes.descendants(top))):
            processes.send_signal(pid, number)

    def exit_codes(self) -> list[int | None]:
        """Of each monitor, None while it runs."""
        return [process.poll() for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for below in reversed(processes.descendants(process.pid)):
                    processes.send_signal(below.pid, signal.SIGKILL)
                process.kill()
                process.wait()
        for port in self._ports.values():
            port.close()

    def __enter__(self) -> DrillCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
