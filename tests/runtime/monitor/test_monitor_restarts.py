"""A monitor that starts its task again: after a signal has killed it, so many times, and never after an error."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import helpers.small_task
from helpers.ports import free_port
from helpers.programs import Program, command_line
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import worker
from lockstep.runtime.monitor.task_process import (
    FINISHED,
    LATER,
    MARKS,
    NO_FORMER_LIFE,
    REPORT_FD,
    FormerLife,
    read_marks,
)
from lockstep.transports.control.monitor_client import Unreachable, describe

pytestmark = pytest.mark.timed
TASK = worker(1)
MONITOR = """
import sys
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.monitor.monitor import MonitorSpec, run_monitor
task, port, restarts, *command = sys.argv[1:]
sys.exit(run_monitor(MonitorSpec(task=TaskId.parse(task), host="127.0.0.1", port=int(port), command=tuple(command),
    version="0.0.test", linger_seconds=0.2, restarts=int(restarts))))
"""


def monitored(port: int, restarts: int, *actions: str) -> Program:
    task = (sys.executable, str(helpers.small_task.__file__), REPORT_FD, *actions)
    return Program([sys.executable, "-c", MONITOR, str(TASK), str(port), str(restarts), *task])


def pid_of(address: str) -> int:
    try:
        found = describe(address, 1.0)
    except Unreachable:
        return 0
    return found.pid if found.phase == "training" and not found.exited else 0


def test_a_killed_task_is_started_again_under_the_same_address() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with monitored(port, 2, "ready=10.0.0.1:1", "phase=training", "hang") as program:
        for _ in range(2):
            pid = wait_until(lambda: pid_of(address), 15, "a life")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: pid_of(address) not in (0, pid), 15, "another life")  # noqa: B023
        os.kill(pid_of(address), signal.SIGKILL)
        done = program.wait(15)
    assert done.code == 1
    assert "restarting /job:worker/replica:0/task:1 (1 of 2 restarts)" in done.stderr
    assert "(2 of 2 restarts)" in done.stderr
    assert done.stderr.count("was killed by SIGKILL") == 3


def test_an_error_that_the_task_reported_is_no_reason_to_start_it_again(tmp_path: Path) -> None:
    with monitored(free_port(), 5, "phase=training", "exit=3") as program:
        done = program.wait(15)
    assert done.code == 3
    assert "starting" not in done.stderr


def test_who_is_asked_to_end_is_not_started_again() -> None:
    port = free_port()
    with monitored(port, 5, "ready=10.0.0.1:1", "phase=training", "hang") as program:
        wait_until(lambda: pid_of(f"127.0.0.1:{port}"), 15, "a life")
        program.signal(signal.SIGTERM)
        done = program.wait(15)
    assert done.code == 128 + signal.SIGTERM
    assert "again" not in done.stderr


def test_another_life_is_told_that_the_one_before_had_done_its_work(tmp_path: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    # Each word after the descriptor is an action: the one that only a second life gets is left out in the first.
    told = (FINISHED, f"wait={tmp_path / 'go'}", "phase=finishing", "hang")
    with monitored(port, 1, "ready=10.0.0.1:1", "phase=training", *told) as program:
        first = wait_until(lambda: pid_of(address), 15, "a life")
        assert FINISHED not in command_line(first)
        (tmp_path / "go").touch()
        wait_until(lambda: describe(address, 1.0).phase == "finishing", 15, "its end")
        os.kill(first, signal.SIGKILL)
        done = program.wait(15)
    # The small task knows no such action, which shows that it was given it.
    assert f"unknown action '{FINISHED}'" in done.stderr


def test_another_life_is_told_that_it_is_not_the_first() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with monitored(port, 1, "ready=10.0.0.1:1", LATER, "phase=training", "hang") as program:
        first = wait_until(lambda: pid_of(address), 15, "a life")
        assert not any("--lockstep_later" in word for word in command_line(first))
        os.kill(first, signal.SIGKILL)
        done = program.wait(15)
    assert "unknown action '--lockstep_later'" in done.stderr


def test_a_task_reads_of_the_incarnations_before_it_what_its_monitor_has_noted() -> None:
    command = ("bench", *MARKS, "--ps=1")
    assert read_marks(NO_FORMER_LIFE.marked(command)) == (["bench", "--ps=1"], NO_FORMER_LIFE)
    former = FormerLife(finished=True, exists=True, job=0x1F0C9A7E)
    assert read_marks(former.marked(command)) == (["bench", "--ps=1"], former)
