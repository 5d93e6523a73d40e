"""Edits of programs that are not ours, written without a line of theirs: where, by a pattern, and what to write there.

``docs/your-program.md`` shows the same lines; ``tools/your_programs.py`` applies them to a copy and runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class How(StrEnum):
    """Where new lines go, seen from the line that is found; CHANGE replaces only what the pattern matches."""

    BEFORE = "before"
    AFTER = "after"
    INSTEAD = "instead of"
    CHANGE = "in"


class EditDoesNotFit(Exception):  # noqa: N818 - reads as the fact it states
    """The program has no line for an edit; the text says which."""


@dataclass(frozen=True, slots=True)
class Edit:
    """New lines get the indentation of the line that is found. With CHANGE it is every line that matches."""

    how: How
    at: str
    write: tuple[str, ...] = ()
    through: str = ""
    """With INSTEAD: the last line that goes, if it is not the first."""
    behind: str = ""
    """Only lines behind one that matches this count."""


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The program after all edits; EditDoesNotFit if one has no place."""
    lines = text.splitlines()
    for edit in edits:
        lines = _apply(lines, edit)
    return "\n".join(lines) + "\n"


def _apply(lines: Sequence[str], edit: Edit) -> list[str]:
    begin = _find(lines, edit.behind, 0) + 1 if edit.behind else 0
    first = _find(lines, edit.at, begin)
    if edit.how is How.CHANGE:
        return [*lines[:begin], *(re.sub(edit.at, edit.write[0], line) for line in lines[begin:])]
    last = _find(lines, edit.through, first) if edit.through else first
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = [indent + line for line in edit.write]
    if edit.how is How.BEFORE:
        return [*lines[:first], *new, *lines[first:]]
    if edit.how is How.AFTER:
        return [*lines[: first + 1], *new, *lines[first + 1 :]]
    return [*lines[:first], *new, *lines[last + 1 :]]


def _find(lines: Sequence[str], pattern: str, begin: int) -> int:
    for number in range(begin, len(lines)):
        if re.search(pattern, lines[number]):
            return number
    raise EditDoesNotFit(f"no line matches {pattern!r}; is this another version of the program?")


def before(at: str, *write: str) -> Edit:
    return Edit(How.BEFORE, at, write)


def after(at: str, *write: str) -> Edit:
    return Edit(How.AFTER, at, write)


def instead(at: str, *write: str, through: str = "", behind: str = "") -> Edit:
    return Edit(How.INSTEAD, at, write, through, behind)


def change(at: str, to: str) -> Edit:
    return Edit(How.CHANGE, at, (to,))
