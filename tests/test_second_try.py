"""The second try of timed tests, seen from outside: pytest as a process, over tests that are written here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.programs import Finished, Program
from helpers.second_try import FILE, MOST

TESTS = Path(__file__).parent
FLAKY = """
import pathlib, pytest
here = pathlib.Path(__file__).parent

def fails_once(name):
    tried = here / name
    first = not tried.exists()
    tried.touch()
    assert not first, f"late: {name}"
"""
XDIST = ("-n", "2")


def run(folder: Path, text: str, *flags: str, file: Path | None = None) -> Finished:
    """Pytest over one file of tests, with the plugin and nothing else of this project."""
    (folder / "test_it.py").write_text(FLAKY + text)
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={folder}", "-o", "markers=timed", *flags]
    for plugin in ("helpers.second_try", "xdist", "pytest_timeout", "no:cacheprovider"):
        command += ("-p", plugin)
    listed = "" if file is None else str(file)
    environment = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", FILE: listed}
    with Program([*command, str(folder / "test_it.py")], environment) as program:
        return program.wait(50)


@pytest.mark.parametrize("flags", [(), XDIST], ids=["alone", "xdist"])
def test_a_timed_test_that_fails_once_is_tried_again_and_listed(tmp_path: Path, flags: tuple[str, ...]) -> None:
    file = tmp_path / "new" / "list.txt"
    end = run(tmp_path, "@pytest.mark.timed\ndef test_a():\n    fails_once('a')\n", *flags, file=file)
    assert end.code == 0, end.stdout
    assert "1 passed, 1 failed first" in end.stdout
    assert "AssertionError: late: a" in end.stdout, "the first failure is shown"
    assert file.read_text() == "test_it.py::test_a\n"


@pytest.mark.parametrize("flags", [(), XDIST], ids=["alone", "xdist"])
def test_no_other_test_is_tried_again(tmp_path: Path, flags: tuple[str, ...]) -> None:
    end = run(tmp_path, "def test_a():\n    fails_once('a')\n", *flags)
    assert end.code == 1
    assert "1 failed" in end.stdout
    assert "failed first" not in end.stdout


def test_what_fails_twice_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    text = "@pytest.mark.timed\ndef test_a():\n    (here / 'tries').open('a').write('x')\n    assert False\n"
    end = run(tmp_path, text, file=file)
    assert end.code == 1
    assert "1 failed, 1 failed first" in end.stdout
    assert (tmp_path / "tries").read_text() == "xx", "two tries, and no third"
    assert file.read_text() == "test_it.py::test_a\n"


MANY = "@pytest.mark.timed\n@pytest.mark.parametrize('n', range({}))\ndef test_a(n):\n    fails_once(f'{{n}}')\n"


def test_as_many_first_failures_as_are_put_up_with_pass_and_one_more_does_not(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    few.mkdir()
    many.mkdir()
    assert run(few, MANY.format(MOST)).code == 0
    end = run(many, MANY.format(MOST + 1))
    assert end.code == 1
    assert f"{MOST + 1} passed, {MOST + 1} failed first" in end.stdout
    assert f"Too many: {MOST + 1} tests failed on the first try." in end.stdout


def test_first_failures_of_former_runs_with_the_same_file_count(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("test_former.py::test_b\n" * MOST)
    end = run(tmp_path, MANY.format(1), file=file)
    assert end.code == 1
    assert "  test_former.py::test_b\n" in end.stdout
    assert file.read_text().endswith("test_it.py::test_a[0]\n")


@pytest.mark.parametrize("flags", [(), XDIST], ids=["alone", "xdist"])
def test_a_crash_is_no_failure_that_is_tried_again(tmp_path: Path, flags: tuple[str, ...]) -> None:
    text = """
@pytest.mark.timed
def test_a():
    import os, signal
    if not (here / "tried").exists():
        (here / "tried").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    end = run(tmp_path, text, *flags)
    assert end.code == (1 if flags else -9), end.stdout
    assert "1 passed" not in end.stdout


def test_a_fixture_that_fails_and_a_test_that_leaves_something_behind_are_not_excused(tmp_path: Path) -> None:
    text = """
@pytest.fixture
def before():
    fails_once("before")

@pytest.fixture
def after():
    yield
    fails_once("after")

@pytest.mark.timed
def test_a(before): ...

@pytest.mark.timed
def test_b(after): ...
"""
    end = run(tmp_path, text)
    assert end.code == 1
    assert "1 passed, 2 errors" in end.stdout
    assert "failed first" not in end.stdout


def test_the_second_try_has_fixtures_and_a_timeout_of_its_own(tmp_path: Path) -> None:
    text = """
import threading
made = []

@pytest.fixture
def number():
    made.append(len(made))
    return made[-1]

@pytest.mark.timed
@pytest.mark.timeout(1)
def test_a(number):
    assert number == 1, "the first try"
    threading.Event().wait(40)
"""
    end = run(tmp_path, text)
    assert end.code == 1
    assert "AssertionError: the first try" in end.stdout
    assert "Timeout (>1.0s)" in end.stdout
