"""Signals to programs of one's own: everybody is told, and all end with the code of the signal, without a traceback."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from helpers.ports import free_ports
from helpers.programs import LOCKSTEP, Program
from lockstep.runtime.checkpoint.folder import CheckpointFolder

PROGRAM = (sys.executable, str(Path(__file__).with_name("endless_program.py")))
TOLD_SECONDS = 2.0
pytestmark = [pytest.mark.timed, pytest.mark.timeout(150)]


@contextmanager
def training(*flags: str) -> Iterator[tuple[Program, Program, Program]]:
    """One ``lockstep ps`` and two programs, which train."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
    lists = (f"--ps_hosts={ports[0]}", f"--worker_hosts={ports[1]},{ports[2]}")
    shared = tuple(flag for flag in flags if flag != "--asleep")
    commands = [(*LOCKSTEP, "ps", *lists, *shared, "--task_index=0")]
    commands += [(*PROGRAM, *lists, *flags, "--job_name=worker", f"--task_index={index}") for index in range(2)]
    with ExitStack() as started:
        server, *workers = [started.enter_context(Program(command, {"OMP_NUM_THREADS": "1"})) for command in commands]
        for one in workers:
            one.wait_for("training", 60)
        yield server, workers[0], workers[1]


@pytest.mark.slow
def test_ctrl_c_ends_every_program_and_the_server_also_where_one_is_busy_with_its_own() -> None:
    with training("--asleep") as programs:
        _, _, busy = programs
        busy.signal(signal.SIGINT)
        for program in programs:
            program.wait_for("worker 1 received SIGINT (Ctrl-C)", TOLD_SECONDS)
        ended = [program.wait(8) for program in programs]
    assert [one.code for one in ended] == [130, 130, 130], ended
    assert not any("Traceback" in one.stderr for one in ended), ended


@pytest.mark.slow
def test_sigterm_of_one_program_is_told_and_is_a_loss() -> None:
    with training("--on_worker_loss=abort") as programs:
        server, chief, other = programs
        other.signal(signal.SIGTERM)
        for program in (server, chief):
            program.wait_for("worker 1 received SIGTERM and leaves", TOLD_SECONDS)
        assert other.wait(12).code == 143
        for program in (server, chief):
            assert "Worker 1 received SIGTERM and left" in program.wait(12).stderr


@pytest.mark.slow
def test_sigterm_of_all_saves_what_was_trained(tmp_path: Path) -> None:
    with training(f"--train_dir={tmp_path}") as programs:
        for program in reversed(programs):
            program.signal(signal.SIGTERM)
        ended = [program.wait(20) for program in programs]
    assert [one.code for one in ended] == [143, 143, 143], ended
    assert len(CheckpointFolder(tmp_path).complete()) == 1
    assert "is saved" in ended[0].stderr


@pytest.mark.slow
def test_sigusr1_writes_the_files_of_a_program_and_its_server_and_ends_neither() -> None:
    with training() as programs:
        for program in programs:
            program.signal(signal.SIGUSR1)
            path = program.wait_for("SIGUSR1: the snapshot and the journal", 5).rpartition(" are in ")[2].split()[0]
            assert Path(path).exists()
            shutil.rmtree(Path(path).parent)
        assert all(program.running() for program in programs)
