"""A run whose parameters are not finite ends with their name, or says it once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmark.runs import BASE, run
from lockstep.errors import EXIT_FAILED
from lockstep.training.parameter_watch import ParametersNotFinite

TOO_FAST = "--init_learning_rate=1e30"
pytestmark = pytest.mark.timeout(120)


def test_the_run_ends_and_names_the_first_parameter_and_the_step() -> None:
    with pytest.raises(
        ParametersNotFinite, match=r"stopped the run: parameter '.+' contains NaN or infinity after step 1"
    ):
        run(TOO_FAST, steps=5)


def test_report_says_it_once_and_the_run_goes_on() -> None:
    ran = run(TOO_FAST, "--on_nan_parameters=report", steps=5)
    assert sum("contains NaN or infinity" in line for line in ran.lines) == 1
    assert ran.result.num_steps == 5


def test_a_finite_run_says_nothing() -> None:
    assert not [line for line in run(steps=3).lines if "NaN" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(), ("--ps=1", "--workers=2"), ("--ps=0", "--workers=2", "--variable_update=distributed_all_reduce")],
    ids=["alone", "servers", "all-reduce"],
)
def test_the_command_ends_with_the_name_and_an_exit_code(shape: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "lockstep", "bench", *shape, *BASE, TOO_FAST, "--num_batches=50"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == EXIT_FAILED, ended.stdout + ended.stderr
    assert "contains NaN or infinity after step" in ended.stdout + ended.stderr
