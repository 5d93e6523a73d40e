"""A whole cluster on one machine as real processes: what is shown, how it ends, and that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

import helpers.small_cluster
import helpers.small_task
from helpers.programs import Program, alive, command_line, processes_mentioning
from helpers.small_cluster import Plan
from helpers.terminals import Terminal
from helpers.waiting import wait_until
from lockstep.diagnose.text import RULE
from lockstep.runtime.local_cluster.cluster import ReservedPort
from lockstep.runtime.monitor.spare import WAITING_NAME
from lockstep.runtime.processes import descendants

pytestmark = pytest.mark.timed

PS = "/job:ps/replica:0/task"
WORKER = "/job:worker/replica:0/task"


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The small task under its own name, by which its processes can be found."""
    link = tmp_path / "small_task.py"
    link.symlink_to(str(helpers.small_task.__file__))
    return str(link)


def command(plan: Plan) -> list[str]:
    return [sys.executable, str(helpers.small_cluster.__file__), plan.to_json()]


def test_the_chief_has_stdout_and_the_others_are_quiet_when_all_goes_well(script: str) -> None:
    tasks = {
        "ps 0": ["say=serving"],
        "worker 0": ["say=step 1", "say=step 2"],
        "worker 1": ["say=step 1 too", "complain=a warning"],
    }
    with Program(command(Plan(script, tasks))) as program:
        finished = program.wait(30)
    assert (finished.code, finished.stdout) == (0, "step 1\nstep 2\n")
    assert finished.stderr == "[worker 1] a warning\n"


def test_a_report_that_every_task_prints_is_shown_once(script: str) -> None:
    report = f"complain={RULE}\nworker 1 is frozen\n{RULE}"
    tasks = {"ps 0": [report], "worker 0": [report, "complain=after it"], "worker 1": [f"complain={RULE}\nanother"]}
    with Program(command(Plan(script, tasks))) as program:
        finished = program.wait(30)
    lines = finished.stderr.splitlines()
    assert sum(line.endswith("worker 1 is frozen") for line in lines) == 1
    assert sum(line.endswith("(the report above)") for line in lines) == 1
    assert "[worker 0] after it" in lines
    assert "[worker 1] another" in lines, "one that was cut short is shown as far as it goes"


def test_everything_is_shown_with_names_on_request(script: str) -> None:
    tasks = {"ps 0": ["say=serving"], "worker 0": ["say=step 1"], "worker 1": ["say=step 1 too"]}
    with Program(command(Plan(script, tasks, show_all=True))) as program:
        finished = program.wait(30)
    assert finished.stdout == "step 1\n"
    assert sorted(finished.stderr.splitlines()) == ["[ps 0] serving", "[worker 1] step 1 too"]


def test_a_folder_gets_the_output_of_every_task(script: str, tmp_path: Path) -> None:
    tasks = {"worker 0": ["complain=mine"], "worker 1": ["say=out", "complain=err", "say=out again"]}
    with Program(command(Plan(script, tasks, logs=str(tmp_path / "logs")))) as program:
        assert program.wait(30).code == 0
    assert (tmp_path / "logs/worker-0.log").read_text() == "mine\n"
    assert sorted((tmp_path / "logs/worker-1.log").read_text().split("\n")) == ["", "err", "out", "out again"]


def test_the_first_failure_is_named_with_its_exit_code_and_its_last_words(script: str) -> None:
    tasks = {"ps 0": ["hang"], "worker 0": ["hang"], "worker 1": ["say=last words", "exit=7"]}
    with Program(command(Plan(script, tasks, end_seconds=0.5, linger=0.0))) as program:
        finished = program.wait(30)
        assert processes_mentioning(script) == []
    assert finished.code == 7
    assert finished.stderr.splitlines() == [
        f"lockstep: {PS}:0, {WORKER}:0 did not end in time and will be killed",
        "[worker 1] last words",
        f"lockstep: {WORKER}:1 failed first: exit code 7",
    ]


def test_a_task_that_ends_because_of_the_first_failure_is_not_taken_for_it(script: str, tmp_path: Path) -> None:
    """Worker 1 is killed; its monitor answers a while longer than that of worker 0, which fails after it."""
    dead = tmp_path / "dead"
    tasks = {"worker 0": [f"wait={dead}", "exit=5"], "worker 1": ["phase=training", "hang"]}
    with Program(command(Plan(script, tasks))) as program:
        workers = wait_until(lambda: tasks_running(script, "phase=training"), 20, "worker 1 runs")
        os.kill(workers[0], signal.SIGKILL)
        wait_until(lambda: not tasks_running(script, "phase=training"), 5, "worker 1 is dead")
        dead.touch()
        finished = program.wait(30)
    assert finished.code == 1
    assert finished.stderr.splitlines()[-1] == f"lockstep: {WORKER}:1 failed first: killed by SIGKILL"


def tasks_running(script: str, action: str) -> list[int]:
    """The processes of tasks themselves, not of their monitors and reapers."""
    commands = {pid: command_line(pid) for pid in processes_mentioning(script)}
    return [pid for pid, command in commands.items() if command[1:2] == [script] and action in command]


def test_servers_that_do_not_end_after_their_workers_are_ended_and_named(script: str) -> None:
    tasks = {"ps 0": ["hang"], "worker 0": ["say=done"]}
    with Program(command(Plan(script, tasks, finish_seconds=0.3))) as program:
        finished = program.wait(30)
    assert (finished.code, finished.stdout) == (1, "done\n")
    assert finished.stderr == f"lockstep: {PS}:0 did not end in time and will be killed\n"


def test_ctrl_c_in_a_terminal_ends_everything_without_a_traceback(script: str) -> None:
    tasks = {name: ["polite", "tty", "child", "hang"] for name in ("ps 0", "worker 0", "worker 1")}
    with Terminal(command(Plan(script, tasks, show_all=True))) as terminal:
        for line in ("[ps 0] no terminal\n", "[worker 1] no terminal\n", "a terminal\n"):
            terminal.wait_for(line, 20)
        terminal.press_ctrl_c()
        assert terminal.program.wait(15).code == 130
        assert processes_mentioning(script) == []
        shown = terminal.shown()
    assert shown.count("leaving\n") == 3
    assert "Traceback" not in shown
    assert shown.count("lockstep:") == shown.count("lockstep: SIGINT ends the job on all 3 tasks") == 1


def test_pressing_ctrl_c_again_kills_tasks_that_do_not_listen(script: str) -> None:
    tasks = {"worker 0": ["deaf", "say=up", "hang"], "worker 1": ["deaf", "hang"]}
    with Terminal(command(Plan(script, tasks))) as terminal:
        terminal.wait_for("up\n", 20)

        def pressed_until_it_ends() -> bool:
            terminal.press_ctrl_c()
            return not terminal.program.running()

        wait_until(pressed_until_it_ends, 15, "the launcher ends")
        assert terminal.program.wait(1).code == 130
        assert processes_mentioning(script) == []
        shown = terminal.shown()
    assert "was killed" not in shown
    assert "Traceback" not in shown


def test_sigterm_ends_everything_too(script: str) -> None:
    with Program(command(Plan(script, {"worker 0": ["say=up", "hang"], "worker 1": ["hang"]}))) as program:
        program.wait_for("up", 20)
        program.signal(signal.SIGTERM)
        finished = program.wait(15)
        assert (finished.code, finished.stderr) == (143, "lockstep: SIGTERM ends the job on all 2 tasks\n")
        assert processes_mentioning(script) == []


def test_nothing_survives_a_launcher_that_was_killed(script: str) -> None:
    tasks = {"ps 0": ["deaf", "child", "hang"], "worker 0": ["deaf", "child", "say=up", "hang"]}
    with Program(command(Plan(script, tasks))) as program:
        program.wait_for("up", 20)
        wait_until(lambda: len(processes_mentioning(script)) >= 9, 20, "launcher and 2 times 4 processes run")
        program.signal(signal.SIGKILL)
        program.wait(5)
        wait_until(lambda: processes_mentioning(script) == [], 5, "all are gone")


def test_a_port_that_another_program_took_leads_to_another_attempt(script: str) -> None:
    with Program(command(Plan(script, {"worker 0": ["say=done"]}, stolen_ports=1))) as program:
        finished = program.wait(30)
    assert (finished.code, finished.stdout) == (0, "done\n")
    assert "starting again on other ports" in finished.stderr


def test_bad_luck_with_ports_has_an_end(script: str) -> None:
    with Program(command(Plan(script, {"worker 0": ["say=done"]}, stolen_ports=100))) as program:
        finished = program.wait(40)
    assert (finished.code, finished.stdout) == (2, "")
    assert "another program took a port on 127.0.0.1 in each of 3 attempts" in finished.stderr


def test_a_reserved_port_is_available_to_a_program_that_names_it() -> None:
    port = ReservedPort()
    try:
        with socket.create_server(("127.0.0.1", int(port.address.rpartition(":")[2]))):
            assert port.is_taken()
        assert not port.is_taken()
    finally:
        port.close()


def waiting_below(program: Program) -> list[int]:
    return [facts.pid for facts in descendants(program.pid) if facts.name == WAITING_NAME]


def test_a_spare_of_the_cluster_takes_the_place_of_any_lost_task_with_its_streams(script: str, tmp_path: Path) -> None:
    """One spare for all: it becomes a server first, and the next one a worker."""
    go = tmp_path / "go"
    lives = {
        "ps 0": ["phase=serving", "complain=a server", f"wait={go}"],
        "worker 0": ["phase=leading", "say=the chief", f"wait={go}"],
        "worker 1": ["phase=working", f"wait={go}"],
    }
    with Program(command(Plan(script, lives, restarts=1, spares=1))) as program:
        program.wait_for("lockstep: 1 spare waits for a task to be lost", 30)
        for phase, said, text in (("serving", program.stderr, "[ps 0] a server"), ("leading", program.stdout, "chief")):
            (spare,) = wait_until(lambda: waiting_below(program), 30, "a spare")
            (task,) = wait_until(lambda p=phase: tasks_running(script, f"phase={p}"), 30, phase)  # type: ignore[misc]
            wait_until(lambda s=said, t=text: s().count(t) == 1, 30, "the first life's word")  # type: ignore[misc]
            os.kill(task, signal.SIGKILL)
            wait_until(lambda s=said, t=text: s().count(t) == 2, 30, "the next life's word")  # type: ignore[misc]
            assert f"(pid {spare})" in program.stderr()
        go.touch()
        finished = program.wait(30)
        assert processes_mentioning(script) == []
    assert finished.code == 0
    assert f"[ps 0] lockstep: a spare takes the place of {PS}:0" in finished.stderr
    assert f"[worker 0] lockstep: a spare takes the place of {WORKER}:0" in finished.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("taken", [False, True], ids=["it waits", "it is a task"])
def test_no_spare_outlives_the_launcher(signum: int, taken: bool, script: str) -> None:
    tasks = {"worker 0": ["phase=leading", "say=here", "hang"], "worker 1": ["hang"]}
    with Program(command(Plan(script, tasks, restarts=1, spares=1))) as program:
        program.wait_for("1 spare waits", 30)
        wait_until(lambda: program.stdout().count("here") == 1, 30, "the chief")
        if taken:
            (chief,) = tasks_running(script, "phase=leading")
            os.kill(chief, signal.SIGKILL)
            wait_until(lambda: program.stdout().count("here") == 2, 30, "its next life")
        below = [facts.pid for facts in descendants(program.pid)]
        program.signal(signum)
        program.wait(30)
        wait_until(lambda: not any(map(alive, below)), 30, "the end of all")


def test_a_monitor_that_is_killed_takes_the_spare_with_it_that_is_its_task(script: str) -> None:
    tasks = {"worker 0": ["hang"], "worker 1": ["phase=working", "complain=here", "hang"]}
    with Program(command(Plan(script, tasks, restarts=1, spares=1, end_seconds=0.5, linger=0.0))) as program:
        program.wait_for("1 spare waits", 30)
        wait_until(lambda: program.stderr().count("[worker 1] here") == 1, 30, "worker 1")
        (spare,) = waiting_below(program)
        (task,) = tasks_running(script, "phase=working")
        os.kill(task, signal.SIGKILL)
        wait_until(lambda: program.stderr().count("[worker 1] here") == 2, 30, "its next life")
        (monitor,) = [pid for pid in processes_mentioning(f"{WORKER}:1") if "small_monitor" in command_line(pid)[1]]
        os.kill(monitor, signal.SIGKILL)
        wait_until(lambda: not alive(spare), 30, "the end of its task")
        assert program.wait(30).code == 1
