"""What a training loop frees stays with its process, unless its user has set malloc up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.training.kept_memory import keep_freed_memory

PAGES = 4_096
"""16 MiB: within what older versions of glibc keep, too."""
PROGRAM = f"""
import resource
import numpy
from lockstep.training.kept_memory import keep_freed_memory

kept = keep_freed_memory()

def step():
    numpy.ones({PAGES} * 4096, dtype=numpy.uint8)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

step()
before = faults()
for _ in range(10):
    step()
print(kept, faults() - before)
"""


def _run(**environ: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    kept, faults = ran.stdout.split()
    return kept, int(faults)


def test_a_block_that_is_freed_and_made_again_is_not_asked_of_the_kernel_again() -> None:
    kept, faults = _run()
    assert kept == "True"
    assert faults < PAGES, "ten blocks cost less than the pages of one"


def test_a_users_own_setting_of_malloc_is_left_alone() -> None:
    assert _run(MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"])
def test_each_of_mallocs_variables_is_a_setting(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


def test_tunables_of_malloc_are_a_setting() -> None:
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})
