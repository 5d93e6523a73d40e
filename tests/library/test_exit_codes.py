"""A program that leaves with an exit code of its own: the code and the place reach the others."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path

import pytest

from lockstep.errors import EXIT_FAILED
from lockstep.library.atexit import ExitWitness, end_with_the_report, why_it_left
from lockstep.library.errors import UsageError
from lockstep.protocol.core.causes import own_error
from lockstep.runtime.task.outcome import JobEndedError, Outcome


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> ExitWitness:
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored in the end
    made = ExitWitness()
    made.install()
    return made


@pytest.mark.parametrize(
    ("status", "code"), [(5, 5), (0, 0), (None, 0), ("no labels", 1), (-1, 255), (256, 0), (True, 1)]
)
def test_the_code_is_the_one_that_python_makes_of_it(witness: ExitWitness, status: object, code: int) -> None:
    with pytest.raises(SystemExit) as left:
        sys.exit(status)  # type: ignore[arg-type]
    assert left.value.code == status
    assert witness.code == code
    assert f"called sys.exit({status!r}) in {__file__}, line " in witness.reason().text


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_the_exit_of_scripts_is_noted_too(
    witness: ExitWitness, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "empty").open("w+") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)  # it closes the real one
        with pytest.raises(SystemExit) as left:
            getattr(builtins, name)(5)
    assert left.value.code == witness.code == 5


@pytest.mark.parametrize("called", [True, False])
def test_an_exception_that_leaves_the_block_of_the_job_is_noted_with_the_place_of_the_program(
    witness: ExitWitness, called: bool
) -> None:
    try:
        if called:
            sys.exit(3)
        raise SystemExit(3)
    except SystemExit as error:
        witness.caught(error)
    assert witness.code == 3
    assert f"called sys.exit(3) in {__file__}, line " in witness.reason().text


def test_a_program_that_goes_on_has_not_left(witness: ExitWitness) -> None:
    with pytest.raises(SystemExit):
        sys.exit(5)
    witness.forget()
    assert witness.code is None


def test_an_exception_is_told_with_the_line_of_the_program_that_it_left() -> None:
    def reads() -> None:
        json.loads("{")  # the error itself is raised in a library

    try:
        reads()
    except ValueError as error:
        reason = why_it_left(error)
    line = reads.__code__.co_firstlineno + 1
    assert reason.text.startswith("failed with JSONDecodeError: ")
    assert f"reads ({Path(__file__).parent.name}/{Path(__file__).name}:{line})" in reason.text
    assert why_it_left(UsageError("wrong")).text == "was used wrongly: wrong"


def test_a_jobs_end_that_is_not_caught_ends_the_program_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored in the end
    end_with_the_report()
    ended = JobEndedError(Outcome(False, "/job:worker/replica:0/task:1", 19, own_error("stopped early")))
    with pytest.raises(SystemExit) as left:
        sys.excepthook(JobEndedError, ended, None)
    assert left.value.code == EXIT_FAILED
    assert capsys.readouterr().err == ""
    error = UsageError("this one is the program's own")
    sys.excepthook(UsageError, error, None)
    assert "the program's own" in capsys.readouterr().err
