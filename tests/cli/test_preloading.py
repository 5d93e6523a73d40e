"""What a spare loads leaves no trace that a task could notice."""

from __future__ import annotations

import sys

import pytest

from helpers.programs import Program

CODE = """
import json, os, random, sys
import torch, numpy
def seen():
    return {
        "torch": torch.get_rng_state().tolist(), "random": repr(random.getstate()), "gpu": torch.cuda.is_initialized(),
        "numpy": repr(numpy.random.get_state()), "threads": len(os.listdir("/proc/self/task")),
        "of torch": torch.get_num_threads(), "type": str(torch.get_default_dtype()), "grad": torch.is_grad_enabled(),
        "devices": [one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")
                    and "nvidia" in os.readlink(f"/proc/self/fd/{one}")],
    }
before = seen()
from lockstep.cli import preloading
getattr(preloading, sys.argv[1])(sys.argv[2:])
after = seen()
assert before == after, {key: (before[key], after[key]) for key in before if before[key] != after[key]}
from lockstep.benchmark.training import inputs
print("opened", list(inputs._opened))
"""


@pytest.mark.parametrize(
    ("call", "words", "opened"),
    [
        (
            "load_for_bench",
            ("--ps=1", "--workers=2", "--model=lenet", "--data_name=digits"),
            "opened [('digits', None)]",
        ),
        ("load_for_program", (), "opened []"),
    ],
)
def test_what_is_loaded_ahead_changes_nothing_that_a_task_starts_with(
    call: str, words: tuple[str, ...], opened: str
) -> None:
    with Program([sys.executable, "-c", CODE, call, *words]) as program:
        done = program.wait(60)
    assert done.code == 0, done.stderr
    assert done.stdout.strip() == opened
