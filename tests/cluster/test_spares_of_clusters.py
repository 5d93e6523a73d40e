"""Spares in real clusters of the benchmark: whatever is lost, a spare takes its place, and the bits are the same."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cluster.tasks import SMALL_RUN, STEPS, THE_RUN, TWO_AND_TWO, tasks_of
from helpers.marks import others_long
from helpers.programs import Program, start_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.runtime.monitor.spare import WAITING_NAME
from lockstep.runtime.processes import descendants
from lockstep.transports.control.monitor_client import describe, snapshot_fields

pytestmark = [pytest.mark.timed, pytest.mark.slow, pytest.mark.timeout(240)]

ONE_COMMAND = (*SMALL_RUN, *THE_RUN, "--ps=2", "--workers=2")


@pytest.mark.parametrize(
    "victim",
    others_long([worker(1), server(1), server(0)], [worker(1), server(1)]),  # the coordinator's: below
    ids=["worker", "server", "coordinator"],
)
def test_a_tasks_own_spare_takes_its_place_and_the_bits_are_the_same(
    victim: TaskId, undisturbed: bytes, tmp_path: Path
) -> None:
    flags = (*THE_RUN, f"--train_dir={tmp_path}", "--server_replicas=1", "--restarts=1")
    with tasks_of(TWO_AND_TWO, *flags) as tasks:
        tasks.start(victim, "--spares=1").wait_for("1 spare waits for a task to be lost", 60)
        for task in TWO_AND_TWO.tasks():
            if task != victim:
                tasks.start(task)
        tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        tasks.programs[victim].wait_for("a spare takes the place of", 20)
        tasks.programs[worker(0)].wait_for(f"\n{STEPS}\timages/sec:", 100)
        results = {task: program.wait(60) for task, program in tasks.programs.items() if task != victim}
    assert {done.code for done in results.values()} == {0}, results
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed


def the_spare(program: Program) -> int:
    waiting = [facts.pid for facts in descendants(program.pid) if facts.name == WAITING_NAME]
    return waiting[0] if waiting else 0


def test_the_spare_of_one_command_takes_the_coordinators_place_and_the_bits_are_the_same(
    undisturbed: bytes, tmp_path: Path
) -> None:
    flags = (f"--train_dir={tmp_path}", "--server_replicas=1", "--restarts=1", "--spares=1")
    with start_lockstep("bench", *ONE_COMMAND, *flags) as program:
        program.wait_for("\n30\timages/sec:", 80)
        where = re.findall(r"lockstep why (\S+:\d+)", program.stderr())[0]
        addresses = dict(snapshot_fields(where, "Monitor")["cluster"])
        # The job stands still until a spare has been loaded.
        stopped = describe(addresses[str(worker(1))], 5.0).pid
        os.kill(stopped, signal.SIGSTOP)
        program.wait_for("1 spare waits for a task to be lost", 60)
        spare = wait_until(lambda: the_spare(program), 60, "a spare")
        os.kill(stopped, signal.SIGCONT)
        os.kill(describe(addresses[str(server(0))], 5.0).pid, signal.SIGKILL)
        program.wait_for(f"a spare takes the place of {server(0)} (pid {spare})", 20)
        done = program.wait(150)
    assert done.code == 0, done
    assert "Traceback" not in done.stderr
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed
