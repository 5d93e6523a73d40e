"""Which commands are Python programs that a spare can become."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.runtime.monitor.python_command import is_this_python, python_command


@pytest.mark.parametrize(
    ("words", "flags", "module", "file", "arguments"),
    [
        ("python train.py", "", "", "train.py", ""),
        ("python train.py --lr 1 -m x", "", "", "train.py", "--lr 1 -m x"),
        ("python -u -OO train.py a", "-u -OO", "", "train.py", "a"),
        ("python -m pkg.train -u", "", "pkg.train", "", "-u"),
        ("python -W error -Xdev -Bs -m train", "-W error -Xdev -Bs", "train", "", ""),
    ],
)
def test_a_python_program_is_taken_apart_and_put_together_again(
    words: str, flags: str, module: str, file: str, arguments: str
) -> None:
    found = python_command(tuple(words.split()))
    assert found is not None
    assert (found.flags, found.arguments) == (tuple(flags.split()), tuple(arguments.split()))
    assert (found.module, found.file) == (module, file)
    assert found.words == tuple(words.split())
    assert python_command(words.split()) == found


@pytest.mark.parametrize(
    "words",
    [
        "",
        "python",
        "python -c pass",
        "python -",
        "python -i train.py",
        "python -m",
        "python -W",
        "python train",
        "bash x",
    ],
)
def test_everything_else_is_not(words: str) -> None:
    assert python_command(words.split()) is None


def test_only_the_interpreter_that_runs_is_this_one(tmp_path: Path) -> None:
    assert is_this_python(sys.executable)
    elsewhere = tmp_path / "python"
    elsewhere.symlink_to(sys.executable)
    assert not is_this_python(str(elsewhere)), "another environment may find other packages"
    assert not is_this_python("no-such-python")
