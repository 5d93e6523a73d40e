"""Servers with second homes that are cut from each other, each task on a host of its own: neither goes on alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.tasks import SMALL_RUN, THE_RUN, TWO_AND_TWO
from helpers.programs import LOCKSTEP, Finished, Program
from lockstep.drill.hosts import Hosts, why_not
from lockstep.protocol.core.ids import CHIEF, TaskId, server

pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.timeout(150)]
ENDS = (server(0), server(1))
NOTHING_PASSES = "are both alive, but nothing passes between them in either direction"
TAKEN_OVER = "has taken its place"


@dataclass(frozen=True)
class CutJob:
    """Two servers and two workers in namespaces, and the network between them."""

    hosts: Hosts
    programs: dict[TaskId, Program]

    def cut(self) -> None:
        for here, there in (ENDS, ENDS[::-1]):
            self.hosts.drop(here, there)

    def heal(self) -> None:
        for end in ENDS:
            self.hosts.restore(end)

    def last_step(self) -> int:
        return max(int(step) for step in re.findall(r"^(\d+)\timages/sec", self.programs[CHIEF].stdout(), re.MULTILINE))

    def finish(self) -> dict[TaskId, Finished]:
        return {task: program.wait(60) for task, program in self.programs.items()}


@contextlib.contextmanager
def training(folder: Path, *more: str) -> Iterator[CutJob]:
    """A job with second homes that has come to step 30."""
    if missing := why_not():
        pytest.skip(missing)
    with Hosts(TWO_AND_TWO.tasks()) as hosts, contextlib.ExitStack() as started:
        shape = TWO_AND_TWO
        lists = [
            f"--{name}_hosts={','.join(f'{hosts.addresses[task]}:5000' for task in tasks)}"
            for name, tasks in (("ps", shape.server_ids()), ("worker", shape.worker_ids()))
        ]
        flags = (*SMALL_RUN, *THE_RUN, *lists, "--server_replicas=1", f"--train_dir={folder}", *more)
        job = CutJob(hosts, {})
        for task in shape.tasks():
            place = (f"--job_name={task.role.value}", f"--task_index={task.index}")
            command = (*hosts.run_prefix(task), *LOCKSTEP, "bench", *flags, *place)
            job.programs[task] = started.enter_context(Program(command))
        job.programs[CHIEF].wait_for("\n30\timages/sec:", 80)
        yield job


def test_two_servers_that_are_cut_from_each_other_wait_and_go_on_once_the_network_heals(
    undisturbed: bytes, tmp_path: Path
) -> None:
    with training(tmp_path) as job:
        job.cut()
        before = job.last_step()
        for program in job.programs.values():
            program.wait_for(NOTHING_PASSES, 30)
        # One version may have been held, and one on its way, when the link was cut.
        assert job.last_step() <= before + 2
        job.heal()
        results = job.finish()
    assert {done.code for done in results.values()} == {0}, results
    assert TAKEN_OVER not in "".join(done.stderr for done in results.values())
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed


def test_a_cut_between_two_servers_that_stays_ends_the_job_with_a_report_that_names_the_link(tmp_path: Path) -> None:
    with training(tmp_path, "--stall_after=8") as job:
        job.cut()
        results = job.finish()
    assert {done.code for done in results.values()} == {3}, results
    said = {task: done.stderr for task, done in results.items()}
    for text in said.values():
        assert re.search(rf"Server (0 and server 1|1 and server 0) {NOTHING_PASSES}", text), said
        assert "No progress within --stall_after" in text, said
        assert TAKEN_OVER not in text
        assert "deadlock" not in text
    report = (tmp_path / "report.txt").read_text()
    assert "link down" in report
    assert NOTHING_PASSES in report
