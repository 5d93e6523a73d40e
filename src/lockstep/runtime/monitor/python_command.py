"""A command that runs a Python program, taken apart: what a spare can become is such a command and nothing else.

Standard library only and quick to import: a spare reads its command with it, too.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_SWITCHES: Final = frozenset("bBdEIOPqsSuv")
_WITH_VALUE: Final = ("-W", "-X")
_MODULE: Final = "-m"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """``python [flags] file.py arguments`` or ``python [flags] -m module arguments``."""

    python: str
    flags: tuple[str, ...]
    module: str = ""
    file: str = ""
    """One of the two is given."""
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        program = (_MODULE, self.module) if self.module else (self.file,)
        return (self.python, *self.flags, *program, *self.arguments)


def python_command(words: Sequence[str]) -> PythonCommand | None:
    """None for everything that is not recognisably a Python program."""
    if not words:
        return None
    at = 1
    while at < len(words) and words[at] != _MODULE and words[at].startswith("-"):
        taken = _flag_at(words, at)
        if not taken:
            return None
        at += taken
    flags, program = tuple(words[1:at]), words[at:]
    if program[:1] == [_MODULE] or program[:1] == (_MODULE,):
        if len(program) < 2:
            return None
        return PythonCommand(python=words[0], flags=flags, module=program[1], arguments=tuple(program[2:]))
    if not program or not program[0].endswith(".py"):
        return None
    return PythonCommand(python=words[0], flags=flags, file=program[0], arguments=tuple(program[1:]))


def _flag_at(words: Sequence[str], at: int) -> int:
    """How many words the interpreter's flag there takes; 0 if it is none that only sets the interpreter up."""
    word = words[at]
    if word in _WITH_VALUE:
        return 2 if at + 1 < len(words) else 0
    if word[:2] in _WITH_VALUE:
        return 1
    return 1 if len(word) > 1 and set(word[1:]) <= _SWITCHES else 0


def is_this_python(word: str) -> bool:
    """Whether this program is the very interpreter that runs now: the same file in the same environment."""
    found = shutil.which(word)
    if found is None:
        return False
    here, there = (os.path.abspath(path) for path in (sys.executable, found))
    same_folder = os.path.realpath(os.path.dirname(here)) == os.path.realpath(os.path.dirname(there))
    return same_folder and os.path.realpath(here) == os.path.realpath(there)
