"""Nothing but our own lines and the program's reaches a user: gRPC's never do, whoever imported it first."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.ports import free_ports
from helpers.programs import Program

PROGRAM = (sys.executable, str(Path(__file__).with_name("loading_program.py")))
SECONDS = 110.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_forking_and_ending_print_no_line_of_grpc() -> None:
    """Forks under a data loader, links that end with the job, and a program that has imported gRPC itself."""
    lists = f"--worker_hosts={','.join(f'127.0.0.1:{port}' for port in free_ports(2))}"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with ExitStack() as started:
        commands = [[*PROGRAM, lists, "--job_name=worker", f"--task_index={index}"] for index in range(2)]
        commands[1].append("--own-grpc")
        tasks = [started.enter_context(Program(command, environment)) for command in commands]
        ended = [task.wait(SECONDS) for task in tasks]
    assert [(one.code, one.stdout) for one in ended] == [(0, "trained\n")] * 2, ended
    foreign = [line for one in ended for line in one.stderr.splitlines() if not line.startswith("lockstep: ")]
    assert not foreign
