"""Edits of other people's programs: what they do to a text, and that the guide shows every line of them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tools.known_programs import NANOGPT, PROGRAMS, KnownProgram
from tools.program_data import write_data
from tools.program_edits import Edit, EditDoesNotFit, after, before, change, edited, instead

ROOT = Path(__file__).parents[1]
PROGRAM = """\
import one
def first(x):
    y = call(x)
    return y
def second(x):
    y = call(x,
             x)
    return y.inner
"""


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (after("^import one", "import two"), ["+import two"]),
        (before("return y$", "z = y", "y = z"), ["+    z = y", "+    y = z"]),
        (instead("y = call"), ["-    y = call(x)"]),
        (
            instead("y = call", "y = x", through=r"x\)$", behind="^def second"),
            ["-    y = call(x,", "-             x)", "+    y = x"],
        ),
        (change(r"\.inner\b", ""), ["-    return y.inner", "+    return y"]),
    ],
)
def test_lines_are_found_by_a_pattern_and_take_its_indentation(edit: Edit, expected: list[str]) -> None:
    lines = difflib.unified_diff(PROGRAM.splitlines(), edited(PROGRAM, [edit]).splitlines(), n=0, lineterm="")
    assert [line for line in lines if line[:2] not in ("--", "++", "@@")] == expected


def test_a_program_without_the_line_is_refused_by_its_pattern() -> None:
    with pytest.raises(EditDoesNotFit, match=r"no line matches '\^import torch\$'"):
        edited(PROGRAM, NANOGPT.ours)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.repository + " " + program.name)
def test_the_guide_shows_every_line_that_is_written(program: KnownProgram) -> None:
    page = (ROOT / "docs" / "your-program.md").read_text()
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(program.name)]
    assert [line for edit in (*program.ours, *program.served) for line in edit.write if line not in text] == []


def test_the_data_is_there_for_every_program(tmp_path: Path) -> None:
    write_data(tmp_path)
    made = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert {"data/own/train.bin", "data/own/val.bin", "data/own/meta.pkl", "data/own/valid.txt"} <= made
    assert "torchvision/digits.npz" in made
