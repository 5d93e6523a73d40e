"""A process that can print nothing: the disk under its log is full, or its output is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.programs import LOCKSTEP

PRINTS = """
import sys
from lockstep.terminal import drop_what_cannot_be_written, say
drop_what_cannot_be_written()
for number in range(3000):
    print("line", number, flush=number % 2 == 0)
say("the end")
sys.exit(7)
"""

SPEAKS = """
from lockstep.terminal import say, say_over
say("one")
say_over("two")
raise SystemExit(7)
"""


@pytest.mark.parametrize("program", [PRINTS, SPEAKS], ids=["a task", "a program with our lines"])
@pytest.mark.parametrize("output", ["/dev/full", "closed"])
def test_a_process_that_cannot_print_goes_on_to_its_own_end(program: str, output: str) -> None:
    redirection = ">&- 2>&-" if output == "closed" else ">/dev/full 2>/dev/full"
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program], timeout=30, check=False
    )
    assert done.returncode == 7


def test_a_command_line_is_refused_with_its_own_exit_code_though_nobody_can_read_why() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*LOCKSTEP, "bench", "--modle=lenet"], stdout=full, stderr=full, timeout=30, check=False)
    assert done.returncode == 2


LOSES = """
import os, sys
from lockstep.terminal import drop_what_cannot_be_written
drop_what_cannot_be_written()
good = os.dup(1)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
print("lost", flush=True)
os.dup2(good, 1)
print("kept", flush=True)
"""


def test_what_was_lost_is_noted_once_printing_works_again() -> None:
    done = subprocess.run([sys.executable, "-c", LOSES], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "lockstep: 1 pieces of output were lost here: No space left on device\nkept\n"
