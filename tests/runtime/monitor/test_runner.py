"""``lockstep run``: any program below a monitor that starts it again after a loss, and after nothing else."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

import helpers.small_task
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Program, alive
from helpers.scraping import scrape, value
from helpers.waiting import wait_until
from lockstep.protocol.core.messages import Description
from lockstep.runtime.monitor.door import RUN_VARIABLE, RunDoor, run_link
from lockstep.runtime.monitor.lives import is_loss
from lockstep.runtime.monitor.runner import exit_code_of
from lockstep.runtime.processes import catches, descendants
from lockstep.transports.control.monitor_client import Unreachable, describe

pytestmark = pytest.mark.timed


def below_run(*actions: str, restarts: int = 1, flags: tuple[str, ...] = ()) -> Program:
    task = (sys.executable, str(helpers.small_task.__file__), "-", *actions)
    return Program([*LOCKSTEP, "run", f"--restarts={restarts}", *flags, "--", *task])


def pid_of(port: int) -> int:
    try:
        found = describe(f"127.0.0.1:{port}", 1.0)
    except Unreachable:
        return 0
    assert found.task == "/job:worker/replica:0/task:1"
    return found.pid if found.phase == "training" and not found.exited else 0


def exited(port: int) -> Description | None:
    found = describe(f"127.0.0.1:{port}", 1.0)
    return found if found.exited else None


def test_a_lost_program_is_started_again_and_keeps_its_address_and_what_it_knew(tmp_path: Path) -> None:
    go, metrics = tmp_path / "go", free_port()
    go.touch()
    flags = (f"--metrics_port={metrics}",)
    with below_run(f"wait={go}", "join=0", "phase=training", "hang", flags=flags) as program:
        where = wait_until(lambda: re.findall(r"\('127\.0\.0\.1:(\d+)'", program.stdout()), 15, "a port")
        port = int(where[0])
        first = wait_until(lambda: pid_of(port), 15, "a life")
        go.unlink()
        os.kill(first, signal.SIGKILL)
        dead = wait_until(lambda: exited(port), 15, "the end, which is told before the next life")
        assert dead is not None
        assert (dead.exit_code, dead.pid) == (-9, first)
        go.touch()
        second = wait_until(lambda: pid_of(port) not in (0, first) and pid_of(port), 15, "another life")
        assert value(scrape(metrics), "lockstep_incarnations_total") == 2
        os.kill(second, signal.SIGKILL)
        done = program.wait(15)
    assert done.code == 137
    known = done.stdout.splitlines()
    assert len(known) == 2
    assert known[0] == known[1]
    assert f"of life {first}" in known[1]
    assert done.stderr.count("restarting /job:worker/replica:0/task:1 (1 of 1 restarts)") == 1


@pytest.mark.parametrize(
    ("actions", "code", "said"),
    [
        (("exit=2",), 2, ""),
        (("join=0", "phase=training", "exit=1"), 1, ""),
        (("join=-1", "phase=training", "kill=SIGKILL"), 137, "this job does not go on after its loss"),
        (("join=0", "phase=finishing", "kill=SIGKILL"), 137, "it had done its part of the job"),
        (("join=0", "phase=training", "over", "kill=SIGKILL"), 137, "it had done its part of the job"),
        (("join=0", "left=0", "kill=SIGSEGV"), 139, "it had done its part of the job"),
        (("kill=SIGTERM",), 143, "was killed by SIGTERM"),
    ],
)
def test_what_is_no_loss_or_cannot_come_back_is_not_started_again(
    actions: tuple[str, ...], code: int, said: str
) -> None:
    if actions[0] == "join=-1":
        actions = (f"join=-{free_port()}", *actions[1:])
    with below_run(*actions) as program:
        done = program.wait(15)
    assert done.code == code
    assert said in done.stderr
    assert "restarting" not in done.stderr


def test_a_task_whose_job_goes_back_is_started_again_whatever_its_code_and_how_often_it_may_be_lost() -> None:
    with below_run("join=0", "phase=training", "back", "say=here", "exit=3", restarts=0) as program:
        done = program.wait(15)
    assert (done.code, done.stdout.count("here")) == (3, 2)
    assert "starting /job:worker/replica:0/task:1 again: its job goes back to the newest checkpoint" in done.stderr


def test_a_signal_is_passed_on_and_the_code_is_that_of_the_program() -> None:
    with below_run("polite", "say=here", "hang") as program:
        program.wait_for("here", 15)
        program.signal(signal.SIGUSR1)
        program.wait_for("does not handle SIGUSR1 now", 15)
        program.signal(signal.SIGTERM)
        done = program.wait(15)
    assert (done.code, done.stdout) == (0, "here\nleaving\n")


def test_a_program_that_does_not_end_when_asked_is_killed() -> None:
    port = free_port()
    with below_run("deaf", f"join={port}", "phase=training", "hang") as program:
        wait_until(lambda: pid_of(port), 15, "a life")
        wait_until(lambda: _end(program), 15, "its end")  # the second signal, if it is not a repetition, kills
        done = program.wait(15)
    assert done.code == 143


def _end(program: Program) -> bool:
    if program.running():
        program.signal(signal.SIGTERM)
    return not program.running()


def test_nothing_outlives_it_whatever_kills_it() -> None:
    with below_run("child", "say=here", "hang") as program:
        program.wait_for("here", 15)
        below = [facts.pid for facts in descendants(program.pid)]
        assert len(below) >= 3  # the reaper, the program, what it started
        program.signal(signal.SIGKILL)
        assert program.wait(15).code == -9
        wait_until(lambda: not any(map(alive, below)), 15, "the end of all")


def test_only_the_first_join_of_a_life_is_the_task() -> None:
    # The second finds the way already used, and would start a sidecar.
    with below_run("join=0", "join=0") as program:
        done = program.wait(15)
    assert done.code == 1
    assert "AssertionError: not the task" in done.stderr


def test_a_port_that_is_taken_is_refused_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with below_run(f"join={port}") as program:
            done = program.wait(15)
    assert f"cannot listen at 127.0.0.1:{port} for /job:worker/replica:0/task:1: the port is taken" in done.stderr
    assert "restarting" not in done.stderr


@pytest.mark.parametrize(("code", "lost"), [(-9, True), (-11, True), (-15, False), (-2, False), (0, False), (1, False)])
def test_what_is_a_loss(code: int, lost: bool) -> None:
    assert is_loss(code) is lost


@pytest.mark.parametrize(
    ("program", "asked", "code"), [(3, None, 3), (0, signal.SIGTERM, 0), (-9, None, 137), (-9, signal.SIGTERM, 143)]
)
def test_the_exit_code_is_that_of_the_program(program: int, asked: int | None, code: int) -> None:
    assert exit_code_of(program, asked) == code


def test_a_variable_that_means_other_descriptors_is_ignored() -> None:
    door = RunDoor()
    reader, writer = os.pipe()
    said = door.described(writer)
    os.close(writer)
    os.close(reader)
    assert run_link({RUN_VARIABLE: said}) is None
    door.close()
    for junk in ("", "junk", "1:2", "1:2:3 4:5:6", "1:2:3 4:5:6 7:8:9"):
        assert run_link({RUN_VARIABLE: junk}) is None


def test_whether_a_process_catches_a_signal() -> None:
    assert catches(os.getpid(), signal.SIGINT)
    assert not catches(os.getpid(), signal.SIGUSR2)
    assert not catches(1 << 30, signal.SIGINT)
