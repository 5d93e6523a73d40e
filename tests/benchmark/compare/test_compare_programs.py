"""The programs of a run: real processes, ended whatever happens."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.benchmark.compare.programs import Program, Programs, RunFailedError, hear_all

SECONDS = 30.0


def start(programs: Programs, name: str, code: str) -> Program:
    return programs.start(name, [sys.executable, "-c", code], talks=True)


def deadline() -> float:
    return time.monotonic() + SECONDS


def test_lines_go_both_ways(tmp_path: Path) -> None:
    with Programs(tmp_path, {}) as programs:
        echo = start(programs, "echo", "print('ready', flush=True); print('result', input(), flush=True)")
        assert echo.hear("ready", deadline()) == ""
        echo.say("go")
        assert echo.hear("result", deadline()) == "go"


def test_a_program_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with Programs(tmp_path, {}) as programs:
        patient = start(programs, "patient", "input()")
        broken = start(programs, "broken", "import sys; sys.exit('out of paper')")
        with pytest.raises(RunFailedError, match="broken ended with exit code 1: out of paper"):
            hear_all([patient, broken], "ready", deadline())


def test_a_silent_program_ends_the_wait_at_its_deadline(tmp_path: Path) -> None:
    with Programs(tmp_path, {}) as programs:
        silent = start(programs, "silent", "input()")
        with pytest.raises(RunFailedError, match="silent did not answer in time"):
            silent.hear("ready", time.monotonic())


def test_no_program_outlives_the_block(tmp_path: Path) -> None:
    started: list[Program] = []

    def interrupted() -> None:
        with Programs(tmp_path, {}) as programs:
            started.extend(start(programs, f"program-{i}", "print('ready', flush=True); input()") for i in range(2))
            hear_all(started, "ready", deadline())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2
    assert not any(psutil.pid_exists(program.process.pid) for program in started)


def test_what_it_said_instead_is_told(tmp_path: Path) -> None:
    with Programs(tmp_path, {}) as programs:
        odd = start(programs, "odd", "print('hello', flush=True); input()")
        with pytest.raises(RunFailedError, match="odd printed 'hello' instead of 'ready'"):
            odd.hear("ready", deadline())


def test_output_of_a_quiet_program_is_kept_in_a_file(tmp_path: Path) -> None:
    with Programs(tmp_path, {"WORD": "paper"}) as programs:
        code = "import os; print(os.environ['WORD'], os.environ['MORE'])"
        quiet = programs.start("quiet", [sys.executable, "-c", code], talks=False, MORE="ink")
        quiet.wait(deadline())
        assert quiet.output.read_text() == "paper ink\n"
