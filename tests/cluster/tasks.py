"""Clusters of real processes: one ``lockstep bench --job_name=...`` a task, as people start them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helpers.ports import free_ports
from helpers.programs import Finished, Program, start_lockstep
from lockstep.protocol.core.ids import ClusterShape, TaskId
from lockstep.protocol.phrases import named
from lockstep.transports.control.monitor_client import Unreachable, describe

SMALL_RUN = ("--device=cpu", "--model=lenet", "--batch_size=4", "--num_threads=1")
TWO_AND_TWO = ClusterShape(2, 2)
STEPS = 150
THE_RUN = (f"--num_batches={STEPS}", "--num_warmup_batches=0", "--optimizer=momentum", "--display_every=1")
"""Long enough to lose a task in it."""


def any_case(task: TaskId) -> str:
    """How a sentence names a task, wherever in the sentence it stands: without the first letter."""
    return named(task)[1:]


@dataclass
class Tasks:
    """The addresses of a cluster, and the tasks started so far."""

    shape: ClusterShape
    flags: tuple[str, ...]
    host: str = "127.0.0.1"
    addresses: dict[TaskId, str] = field(default_factory=dict)
    programs: dict[TaskId, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ports = free_ports(2 * len(self.shape.tasks()))[::2]  # torch's store is at the port after that of worker 0
        self.addresses = {task: f"{self.host}:{port}" for task, port in zip(self.shape.tasks(), ports, strict=True)}

    def start(self, task: TaskId, *more: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start one task the way a person does; a former life of it must have ended."""
        if task in self.programs:
            self.programs[task].close()
        program = start_lockstep(
            "bench",
            *self.flags,
            *self.lists(),
            f"--job_name={task.role.value}",
            f"--task_index={task.index}",
            *more,
            environment=environment,
        )
        self.programs[task] = program
        return program

    def lists(self) -> list[str]:
        """The host lists, as flags."""
        flags = (("--ps_hosts", self.shape.server_ids()), ("--worker_hosts", self.shape.worker_ids()))
        return [f"{flag}={','.join(self.addresses[task] for task in ids)}" for flag, ids in flags]

    def task_pid(self, task: TaskId) -> int:
        """The process of the task itself (its monitor is the program that was started); 0 while there is none."""
        try:
            return describe(self.addresses[task], 1.0).pid
        except Unreachable:
            return 0

    def finish(self, seconds: float) -> dict[TaskId, Finished]:
        """Wait until all tasks have ended."""
        return {task: program.wait(seconds) for task, program in self.programs.items()}


def final_of(folder: Path, *flags: str) -> bytes:
    """The file with the parameters that such a run ends with, on two servers and two workers."""
    with tasks_of(TWO_AND_TWO, *flags, f"--train_dir={folder}") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        assert {done.code for done in tasks.finish(100).values()} == {0}
    return (folder / "final.safetensors").read_bytes()


@contextlib.contextmanager
def tasks_of(shape: ClusterShape, *flags: str, host: str = "127.0.0.1") -> Iterator[Tasks]:
    """A cluster whose tasks the test starts; whatever still runs at the end is killed."""
    tasks = Tasks(shape, (*SMALL_RUN, *flags), host)
    try:
        yield tasks
    finally:
        for program in tasks.programs.values():
            program.close()
