"""How a process ended is known even though somebody else is its parent."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from lockstep.runtime.processes import wait_readable
from lockstep.watch.process_ends import ProcessEnd, ProcessEnds


def ended(deaths: ProcessEnds, pid: int) -> ProcessEnd:
    assert wait_readable([deaths.descriptor], 30.0)
    assert deaths.take()
    found = deaths.of(pid)
    assert found is not None
    return found


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_exit_code_of_a_process_that_nobody_has_reaped(code: str, expected: int) -> None:
    with contextlib.closing(ProcessEnds()) as deaths:
        process = subprocess.Popen([sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE)
        deaths.watch(process.pid)
        assert not deaths.take()
        assert deaths.of(process.pid) is None
        process.stdin.write(b"\n")  # type: ignore[union-attr]  # it is a pipe
        process.stdin.close()  # type: ignore[union-attr]
        assert ended(deaths, process.pid).exit_code == expected
        assert not deaths.take()
        process.wait()


def test_one_that_was_gone_before() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with contextlib.closing(ProcessEnds()) as deaths:
        deaths.watch(process.pid)
        assert ended(deaths, process.pid).exit_code is None
