"""Spares in real clusters of the benchmark: whatever is lost, a spare takes its place, and the bits are the same."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cluster.tasks import SMALL_RUN, tasks_of
from helpers.programs import Program, run_lockstep, start_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.runtime.monitor.spare import WAITING_NAME
from lockstep.runtime.processes import descendants
from lockstep.transports.control.monitor_client import describe, snapshot_fields

pytestmark = [pytest.mark.timed, pytest.mark.slow, pytest.mark.timeout(240)]

TWO_AND_TWO = ClusterShape(2, 2)
RUN = ("--num_warmup_batches=0", "--optimizer=momentum", "--display_every=1")
ONE_COMMAND = (*SMALL_RUN, *RUN, "--ps=2", "--workers=2")
FEW, MANY = "--num_batches=150", "--num_batches=1500"
"""Many enough for a spare to be ready before they are made."""


def final_of(folder: Path, steps: str) -> bytes:
    done = run_lockstep("bench", *ONE_COMMAND, steps, f"--train_dir={folder}", timeout=150)
    assert done.code == 0, done
    return (folder / "final.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return final_of(tmp_path_factory.mktemp("undisturbed"), FEW)


@pytest.mark.parametrize("victim", [worker(1), server(1), server(0)], ids=["worker", "server", "coordinator"])
def test_a_tasks_own_spare_takes_its_place_and_the_bits_are_the_same(
    victim: TaskId, undisturbed: bytes, tmp_path: Path
) -> None:
    flags = (*RUN, FEW, f"--train_dir={tmp_path}", "--server_replicas=1", "--restarts=1")
    with tasks_of(TWO_AND_TWO, *flags) as tasks:
        tasks.start(victim, "--spares=1").wait_for("1 spare waits for a task to be lost", 60)
        for task in TWO_AND_TWO.tasks():
            if task != victim:
                tasks.start(task)
        tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        tasks.programs[victim].wait_for("a spare takes the place of", 20)
        tasks.programs[worker(0)].wait_for("\n150\timages/sec:", 100)
        results = {task: program.wait(60) for task, program in tasks.programs.items() if task != victim}
    assert {done.code for done in results.values()} == {0}, results
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed


def the_spare(program: Program) -> int:
    waiting = [facts.pid for facts in descendants(program.pid) if facts.name == WAITING_NAME]
    return waiting[0] if waiting else 0


def test_the_spare_of_one_command_takes_the_coordinators_place_and_the_bits_are_the_same(tmp_path: Path) -> None:
    wanted = final_of(tmp_path / "undisturbed", MANY)
    flags = (MANY, f"--train_dir={tmp_path / 'run'}", "--server_replicas=1", "--restarts=1", "--spares=1")
    with start_lockstep("bench", *ONE_COMMAND, *flags) as program:
        program.wait_for("1 spare waits for a task to be lost", 80)
        program.wait_for("\n30\timages/sec:", 80)
        where = re.findall(r"lockstep why (\S+:\d+)", program.stderr())[0]
        addresses = dict(snapshot_fields(where, "Monitor")["cluster"])
        spare = wait_until(lambda: the_spare(program), 60, "a spare")
        os.kill(describe(addresses[str(server(0))], 5.0).pid, signal.SIGKILL)
        program.wait_for(f"a spare takes the place of {server(0)} (pid {spare})", 20)
        done = program.wait(150)
    assert done.code == 0, done
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "final.safetensors").read_bytes() == wanted
