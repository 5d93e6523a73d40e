"""Children that a program starts leave as they do without us: at once, quietly, and without a word to the job."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.ports import free_ports
from helpers.programs import LOCKSTEP, Finished, Program

PROGRAM = (sys.executable, str(Path(__file__).with_name("forking_program.py")))
SECONDS = 110.0
MORE = 3.0
"""Seconds that a case may take more than without us. A data loader waits 5 s for each child that does not leave."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
pytestmark = [pytest.mark.timed, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


def seconds_of(finished: Finished) -> dict[str, float]:
    assert finished.code == 0, finished
    return {case: float(took) for case, took in (line.split() for line in finished.stdout.splitlines())}


def run_with_and_without_us(cases: tuple[str, ...]) -> tuple[Finished, dict[str, float]]:
    """How the program ended as the only worker of a cluster, and what each case takes in plain torch."""
    with Program([*PROGRAM, "--plain", *(c for c in cases if c != "fork:training")], ENVIRONMENT) as alone:
        usual = seconds_of(alone.wait(SECONDS))
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    lists = (f"--ps_hosts={addresses[0]}", f"--worker_hosts={addresses[1]}")
    with ExitStack() as started:
        served = started.enter_context(Program([*LOCKSTEP, "ps", *lists], ENVIRONMENT))
        program = started.enter_context(Program([*PROGRAM, *lists, "--job_name=worker", *cases], ENVIRONMENT))
        finished = program.wait(SECONDS)
        assert served.wait(SECONDS).code == 0
    return finished, usual


@pytest.mark.parametrize(
    "cases",
    [
        ("loader:2:fork", "loader:4:fork", "process:fork", "fork:at-once", "fork:in-order", "fork:training", "command"),
        ("loader:2:spawn", "loader:2:forkserver", "process:spawn", "process:forkserver"),
    ],
    ids=["forked", "started anew"],
)
def test_children_of_a_program_leave_as_they_do_without_us(cases: tuple[str, ...]) -> None:
    finished, usual = run_with_and_without_us(cases)
    took = seconds_of(finished)
    assert list(took) == list(cases)
    late = {case: (took[case], usual[case]) for case in usual if took[case] > usual[case] + MORE}
    assert not late, finished
    foreign = [line for line in finished.stderr.splitlines() if not line.startswith("lockstep: ")]
    assert not foreign, finished.stderr
    assert "verdict" not in finished.stderr
