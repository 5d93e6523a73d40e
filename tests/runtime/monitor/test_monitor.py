"""A monitor and its task as real processes: who is told what when the task, or the monitor, ends in whatever way."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import helpers.small_monitor
import helpers.small_task
from helpers.ports import free_port
from helpers.programs import Program, alive, processes_mentioning
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import TaskId, worker
from lockstep.protocol.core.messages import Description
from lockstep.runtime.monitor.reaper import Reaper
from lockstep.runtime.monitor.task_process import REPORT_FD
from lockstep.runtime.processes import STOP_SIGNALS, SignalInbox
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_stack, watch

pytestmark = pytest.mark.timed

TASK = worker(1)


@dataclass
class Monitored:
    """A running monitor, its address, and the script that its task runs (named so that its processes can be found)."""

    program: Program
    address: str
    script: str

    def describe(self) -> Description:
        return describe(self.address, 2.0)

    def wait_for_phase(self, phase: str) -> Description:
        def reached() -> Description | None:
            try:
                description = self.describe()
            except Unreachable:
                return None
            return description if description.phase == phase else None

        found = wait_until(reached, 15, f"phase {phase}; {self.program.stderr()}")
        assert found is not None
        return found

    def left(self) -> list[int]:
        """Processes that belong to the task or guard it."""
        return processes_mentioning(self.script)


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The small task under a name of its own."""
    link = tmp_path / "small_task.py"
    link.symlink_to(str(helpers.small_task.__file__))
    return str(link)


@contextmanager
def monitored(
    script: str,
    *actions: str,
    task: TaskId = TASK,
    port: int = 0,
    linger: float = 3.0,
    stop: float = 5.0,
) -> Iterator[Monitored]:
    port = port or free_port()
    monitor = [sys.executable, str(helpers.small_monitor.__file__), str(task), str(port), str(linger), str(stop)]
    with Program([*monitor, sys.executable, script, REPORT_FD, *actions]) as program:
        yield Monitored(program, f"127.0.0.1:{port}", script)


def test_a_task_is_described_with_what_it_reported(script: str) -> None:
    with monitored(script, "ready=10.0.0.1:999", "phase=training", "polite", "hang") as monitor:
        found = monitor.wait_for_phase("training")
        assert found.task == str(TASK)
        assert found.task_address == "10.0.0.1:999"
        assert (found.incarnation, found.job) == (helpers.small_task.INCARNATION, helpers.small_task.JOB)
        assert found.monitor_pid == monitor.program.pid
        assert script in Path(f"/proc/{found.pid}/cmdline").read_text()
        assert (found.exited, found.version) == (False, "0.0.test")
        later = wait_until(lambda: max(monitor.describe().phase_seconds - found.phase_seconds, 0), 5, "the phase ages")
        assert later > 0


def test_the_exit_code_of_the_task_is_that_of_the_monitor_and_nothing_is_added_to_its_words(script: str) -> None:
    with monitored(script, "say=hello", "complain=my own error", "exit=3", linger=0.0) as monitor:
        finished = monitor.program.wait(15)
    assert (finished.code, finished.stdout, finished.stderr) == (3, "hello\n", "my own error\n")


def test_a_task_that_ends_well_ends_its_monitor_at_once(script: str) -> None:
    with monitored(script, "say=done", "exit=0", linger=60.0) as monitor:
        assert monitor.program.wait(15).code == 0
        assert monitor.left() == []


def test_the_exit_code_can_be_asked_for_after_a_failure(script: str) -> None:
    with monitored(script, "exit=3", linger=60.0) as monitor:
        found = monitor.wait_for_phase("ended")
        assert (found.exited, found.exit_code) == (True, 3)
        assert monitor.program.running()
        monitor.program.signal(signal.SIGINT)  # whoever does not want to wait need not
        assert monitor.program.wait(5).code == 3


def test_a_killed_task_is_told_in_one_line_with_its_signal(script: str) -> None:
    with monitored(script, "phase=training", "hang", linger=60.0) as monitor:
        pid = monitor.wait_for_phase("training").pid
        os.kill(pid, signal.SIGKILL)
        found = monitor.wait_for_phase("ended")
        assert (found.exited, found.exit_code, found.pid) == (True, -signal.SIGKILL, pid)
        line = monitor.program.stderr()
        assert line.startswith(f"lockstep: {TASK} (pid {pid}) was killed by SIGKILL; ")
        assert line.count("\n") == 1
        monitor.program.signal(signal.SIGTERM)
        assert monitor.program.wait(5).code == 1
        assert monitor.left() == []


def test_a_crash_in_native_code_is_told_with_its_signal(script: str) -> None:
    with monitored(script, "kill=SIGSEGV", linger=0.0) as monitor:
        finished = monitor.program.wait(15)
    assert finished.code == 1
    assert "was killed by SIGSEGV; a crash in native code" in finished.stderr


def test_the_monitor_leaves_soon_after_a_failure_though_nobody_asks(script: str) -> None:
    with monitored(script, "exit=1", linger=0.5) as monitor:
        assert monitor.program.wait(15).code == 1


def test_watchers_are_told_of_a_death_within_a_second_and_the_monitor_leaves_after_that(script: str) -> None:
    heard: queue.SimpleQueue[tuple[float, Description]] = queue.SimpleQueue()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with monitored(script, "phase=training", "hang", linger=60.0) as monitor:
        pid = monitor.wait_for_phase("training").pid
        watching = watch(monitor.address, lambda found: heard.put((time.monotonic(), found)), lost.put)
        try:
            assert heard.get(timeout=5)[1].pid == pid
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            found = heard.get(timeout=5)
            while not found[1].exited:
                found = heard.get(timeout=5)
            assert found[0] - killed_at < 1.0
            assert found[1].exit_code == -signal.SIGKILL
            assert monitor.program.wait(10).code == 1  # long before the 60 s
            assert lost.get(timeout=5)
        finally:
            watching.close()


def test_watchers_get_the_last_word_of_a_task_that_ends_well(script: str, tmp_path: Path) -> None:
    heard: queue.SimpleQueue[Description] = queue.SimpleQueue()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    go = tmp_path / "go"
    with monitored(script, "phase=training", f"wait={go}", "phase=finishing", "exit=0") as monitor:
        monitor.wait_for_phase("training")
        watching = watch(monitor.address, heard.put, lost.put)
        try:
            heard.get(timeout=5)
            go.touch()
            last = heard.get(timeout=5)
            while not last.exited:
                last = heard.get(timeout=5)
            assert (last.phase, last.exit_code) == ("ended", 0)
            assert monitor.program.wait(5).code == 0
            assert "ended the watch" in lost.get(timeout=5)
        finally:
            watching.close()


def test_a_frozen_task_is_still_described_with_its_state_and_its_stack(script: str) -> None:
    with monitored(script, "phase=training", "hang") as monitor:
        pid = monitor.wait_for_phase("training").pid
        os.kill(pid, signal.SIGSTOP)
        try:
            found = monitor.describe()
            assert (found.phase, found.exited) == ("training", False)
            wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", 5, "stopped")
            snapshot = json.loads(fetch_stack(monitor.address, 5.0))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert snapshot["process"]["state"] == "stopped"
        assert snapshot["stack"]["problem"] == ""
        assert "small_task.py" in snapshot["stack"]["text"]
        assert "SmallTask.do" in snapshot["stack"]["text"]
        assert [entry["phase"] for entry in snapshot["phases"]] == ["starting", "training"]
        assert snapshot["description"]["pid"] == pid


def test_a_frozen_task_is_ended_too(script: str) -> None:
    with monitored(script, "polite", "phase=training", "hang", stop=60.0) as monitor:
        pid = monitor.wait_for_phase("training").pid
        os.kill(pid, signal.SIGSTOP)
        monitor.program.signal(signal.SIGTERM)
        assert monitor.program.wait(10).code == 143


def test_the_task_dies_with_its_monitor_and_so_does_all_that_it_started(script: str) -> None:
    with monitored(script, "child", "phase=training", "hang") as monitor:
        pid = monitor.wait_for_phase("training").pid
        wait_until(lambda: len(monitor.left()) >= 4, 10, "monitor, reaper, task and its child run")
        monitor.program.signal(signal.SIGKILL)
        monitor.program.wait(5)
        wait_until(lambda: not alive(pid), 1.0, "the task is gone")
        wait_until(lambda: monitor.left() == [], 5, "all that the task started is gone")


def test_nothing_is_left_when_the_keeper_is_killed(script: str) -> None:
    with monitored(script, "child", "phase=training", "hang", linger=0.0) as monitor:
        pid = monitor.wait_for_phase("training").pid
        wait_until(lambda: len(monitor.left()) >= 4, 10, "monitor, reaper, task and its child run")
        reaper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(reaper, signal.SIGKILL)
        finished = monitor.program.wait(10)
        assert finished.code == 1
        assert "its reaper was killed" in finished.stderr
        assert monitor.left() == []


def test_what_a_task_leaves_behind_is_ended(script: str) -> None:
    with monitored(script, "child", "exit=0") as monitor:
        assert monitor.program.wait(15).code == 0
        assert monitor.left() == []


def test_ctrl_c_asks_the_task_to_end_and_prints_no_traceback(script: str) -> None:
    with monitored(script, "polite", "phase=training", "hang") as monitor:
        monitor.wait_for_phase("training")
        monitor.program.signal(signal.SIGINT)
        finished = monitor.program.wait(10)
    assert (finished.code, finished.stdout, finished.stderr) == (130, "leaving\n", "")


def test_ctrl_c_before_the_task_can_handle_anything_ends_it_silently(script: str) -> None:
    with monitored(script, "phase=importing torch", "hang") as monitor:
        monitor.wait_for_phase("importing torch")
        monitor.program.signal(signal.SIGINT)
        finished = monitor.program.wait(10)
    assert (finished.code, finished.stderr) == (130, "")


def test_a_second_ctrl_c_kills_at_once(script: str) -> None:
    with monitored(script, "deaf", "phase=training", "hang", stop=60.0) as monitor:
        monitor.wait_for_phase("training")

        def pressed_again() -> bool:
            if monitor.program.running():
                monitor.program.signal(signal.SIGINT)
            return not monitor.program.running()

        monitor.program.signal(signal.SIGINT)
        wait_until(pressed_again, 10, "the monitor ends")
        finished = monitor.program.wait(1)
        assert (finished.code, finished.stderr) == (130, "")
        assert monitor.left() == []


def test_a_task_that_does_not_end_when_asked_is_killed_and_that_is_said(script: str) -> None:
    with monitored(script, "deaf", "phase=training", "hang", stop=0.5) as monitor:
        monitor.wait_for_phase("training")
        monitor.program.signal(signal.SIGTERM)
        finished = monitor.program.wait(10)
        assert finished.code == 143
        assert finished.stderr == f"lockstep: {TASK} did not end within 0.5 s when asked to, and was killed\n"
        assert monitor.left() == []


def test_a_taken_port_is_refused_with_the_process_that_has_it_and_nothing_is_started(script: str) -> None:
    with monitored(script, "phase=training", "hang") as first:
        first.wait_for_phase("training")
        with monitored(script, "say=started", port=int(first.address.rpartition(":")[2])) as second:
            finished = second.program.wait(15)
        assert finished.code == 2
        assert finished.stdout == ""
        assert finished.stderr.count("\n") == 1
        assert finished.stderr.startswith(f"lockstep: cannot listen at {first.address} for {TASK}: the port is taken")
        assert f"process {first.program.pid} (" in finished.stderr


def test_a_command_that_does_not_exist_is_told_in_one_line() -> None:
    monitor = [sys.executable, str(helpers.small_monitor.__file__), str(TASK), str(free_port()), "0", "5"]
    with Program([*monitor, "/no/such/program"]) as program:
        finished = program.wait(15)
    assert finished.code == 1
    assert finished.stderr == f"lockstep: {TASK}: cannot start /no/such/program: No such file or directory\n"


def test_a_monitor_started_with_nohup_survives_the_end_of_the_terminal(script: str) -> None:
    with Program(
        [
            *("sh", "-c", 'trap "" HUP; exec "$@"', "sh"),
            *(sys.executable, str(helpers.small_monitor.__file__), str(TASK), str(port := free_port()), "0", "5"),
            *(sys.executable, script, REPORT_FD, "polite", "phase=training", "hang"),
        ]
    ) as program:
        monitor = Monitored(program, f"127.0.0.1:{port}", script)
        monitor.wait_for_phase("training")
        program.signal(signal.SIGHUP)
        program.signal(signal.SIGTERM)
        assert program.wait(10).code == 143


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # only ever exec follows
def test_ctrl_c_in_the_moment_of_the_start_is_not_lost(script: str) -> None:
    """Between fork and exec a task is not itself yet; a request to end that comes then must reach it all the same."""
    with SignalInbox(STOP_SIGNALS), open(os.devnull, "wb") as nothing:
        for _ in range(5):
            reaper = Reaper(os.getpid(), nothing.fileno(), nothing.fileno(), nothing.fileno())
            task = reaper._start([sys.executable, script, "-", "hang"])
            os.kill(task, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) == -signal.SIGTERM
