"""The sidecar of a program of one's own: the task starts it, and it sees how the task ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import helpers.small_task
from helpers.ports import free_port
from helpers.programs import Program, processes_mentioning
from helpers.scraping import scrape, value
from helpers.waiting import wait_until
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import Description
from lockstep.runtime.monitor import sidecar
from lockstep.runtime.monitor.sidecar import UNKNOWN_EXIT_CODE, SidecarError, start_sidecar
from lockstep.runtime.startup.metrics_options import MetricsOptions
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_stack, snapshot_fields

pytestmark = pytest.mark.timed


def own_program(port: int, *actions: str) -> Program:
    """A program that starts its sidecar first."""
    return Program([sys.executable, str(helpers.small_task.__file__), "-", f"sidecar={port}", *actions])


def described(port: int, condition: Callable[[Description], bool], what: str) -> Description:
    def found() -> Description | None:
        try:
            description = describe(f"127.0.0.1:{port}", 2.0)
        except Unreachable:
            return None
        return description if condition(description) else None

    description = wait_until(found, 15, what)
    assert description is not None
    return description


def sidecars(port: int) -> list[int]:
    return processes_mentioning(f'"port": {port}')


def test_a_sidecar_describes_the_program_that_started_it() -> None:
    port = free_port()
    with own_program(port, "ready=10.0.0.1:5", "phase=training", "hang") as program:
        found = described(port, lambda found: found.phase == "training", "training")
        assert found.pid == program.pid
        assert (found.task, found.task_address) == ("/job:worker/replica:0/task:1", "10.0.0.1:5")
        assert sidecars(port) == [found.monitor_pid]
        snapshot = json.loads(fetch_stack(f"127.0.0.1:{port}", 5.0))
        assert (snapshot["process"]["pid"], snapshot["process"]["state"]) == (program.pid, "sleeping")
        assert "SmallTask.do (" in snapshot["stack"]["text"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_the_program_is_told_with_its_signal_and_the_sidecar_leaves(signum: int) -> None:
    port = free_port()
    with own_program(port, "phase=training", "hang") as program:
        described(port, lambda found: found.phase == "training", "training")
        program.signal(signum)
        # Not reaped yet: the zombie still has its exit code, on every kernel.
        found = described(port, lambda found: found.exited, "the death")
        assert found.exit_code == -signum
        assert f"(pid {program.pid}) was killed by {signal.Signals(signum).name}" in program.stderr()
        wait_until(lambda: sidecars(port) == [], 10, "the sidecar is gone")
        program.wait(1)


def test_the_death_of_a_program_that_was_reaped_at_once_is_told() -> None:
    port = free_port()
    with own_program(port, "phase=training", "hang") as program:
        described(port, lambda found: found.phase == "training", "training")
        program.signal(signal.SIGKILL)
        program.wait(5)
        found = described(port, lambda found: found.exited, "the death")
        # Kernels before 6.15 tell the exit code of the reaped to nobody.
        assert found.exit_code in (-signal.SIGKILL, UNKNOWN_EXIT_CODE)
        wait_until(lambda: sidecars(port) == [], 10, "the sidecar is gone")


def test_a_death_is_seen_though_a_child_holds_everything_open() -> None:
    """Worker processes of a data loader are forked and have the pipe for reports open too."""
    port = free_port()
    with own_program(port, "fork", "phase=training", "hang") as program:
        described(port, lambda found: found.phase == "training", "training")
        program.signal(signal.SIGKILL)
        described(port, lambda found: found.exited, "the death")
        (child,) = processes_mentioning(f"sidecar={port}")
        os.kill(child, signal.SIGKILL)


def test_a_program_that_says_how_it_ends_is_quoted_and_may_go_on() -> None:
    port = free_port()
    with own_program(port, "phase=training", "close=0", "say=still here", "hang") as program:
        program.wait_for("still here", 15)
        assert sidecars(port) == []
        assert program.running()


def test_a_program_that_closes_all_descriptors_is_cut_off_and_has_not_ended() -> None:
    port = free_port()
    with own_program(port, "phase=training", "close_all", "hang") as program:
        found = described(port, lambda found: found.exited or found.phase == TaskPhase.CUT_OFF, "a cut-off program")
        assert (found.exited, found.pid) == (False, program.pid)
        program.signal(signal.SIGKILL)
        assert described(port, lambda found: found.exited, "the death").exit_code == -signal.SIGKILL


def test_a_program_that_fails_after_joining_is_told_by_its_exit_code() -> None:
    port = free_port()
    with own_program(port, "phase=training", "exit=3") as program:
        found = described(port, lambda found: found.exited, "the end")
        assert found.exit_code == 3
        wait_until(lambda: sidecars(port) == [], 10, "the sidecar is gone")
        assert program.wait(5).code == 3


def test_signals_to_all_processes_of_a_job_do_not_end_the_sidecar_before_the_program() -> None:
    port = free_port()
    with own_program(port, "deaf", "phase=training", "hang") as program:
        found = described(port, lambda found: found.phase == "training", "training")
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(found.monitor_pid, signum)
        assert not described(port, lambda found: True, "still there").exited
        program.signal(signal.SIGKILL)
        assert described(port, lambda found: found.exited, "the death").exit_code == -signal.SIGKILL


def test_a_taken_port_is_refused_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SidecarError, match=f"cannot listen at 127.0.0.1:{port} .*the port is taken by process"):
            start_sidecar(worker(1), "127.0.0.1", port, "0")
    assert sidecars(port) == []


def test_leaving_the_block_ends_the_sidecar() -> None:
    port = free_port()
    with start_sidecar(worker(0), "127.0.0.1", port, "1.2.3") as mine:
        assert describe(f"127.0.0.1:{port}", 5.0).pid == os.getpid()
        assert sidecars(port) == [mine.pid]
    assert sidecars(port) == []
    mine.close()


def test_a_sidecar_gives_the_addresses_of_all_tasks() -> None:
    port = free_port()
    cluster = {str(worker(0)): f"127.0.0.1:{port}", str(worker(1)): "127.0.0.1:2"}
    with start_sidecar(worker(0), "127.0.0.1", port, "1.2.3", cluster=tuple(cluster.items())):
        assert snapshot_fields(f"127.0.0.1:{port}", "Monitor")["cluster"] == cluster


def test_an_exit_code_that_nobody_tells_is_unknown() -> None:
    """As on a kernel that knows no exit information of foreign processes: here, of one that never was."""
    assert sidecar._exit_code_of_the_dead(2**22 + 1, None) == UNKNOWN_EXIT_CODE
    assert not Path(f"/proc/{2**22 + 1}").exists()


def test_a_sidecar_shows_metrics_and_says_why_it_cannot() -> None:
    port = free_port()
    where = MetricsOptions(str(free_port()))
    with start_sidecar(worker(1), "127.0.0.1", port, "0.0.test", 0.0, metrics=where) as own:
        own.reporter.phase(TaskPhase.TRAINING)
        text = wait_until(lambda: _training(scrape(int(where.port))), 15, "the phase")
        assert value(text, "lockstep_task_up", task=str(worker(1))) == 1
        with pytest.raises(SidecarError, match=rf"cannot show metrics at 127.0.0.1:{where.port}: the port is taken by"):
            start_sidecar(worker(2), "127.0.0.1", free_port(), "0.0.test", 0.0, metrics=where)


def _training(page: str) -> str:
    return page if value(page, "lockstep_task_phase_info", phase="training") else ""
