"""What people build on does not disappear by accident: names that were public once, one per line, still exist.

``python -m test_public_names > public_names.txt`` in ``tests/`` adds what is new. A name that is taken away on purpose
was announced a version earlier (docs/compatibility.md), and its line goes with it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import lockstep
from lockstep import errors
from lockstep.cli.flags.flag import Status
from lockstep.cli.flags.table import TABLE
from lockstep.cli.main import COMMANDS
from lockstep.library.job import Job
from lockstep.protocol.core.causes import Cause

LIST = Path(__file__).with_name("public_names.txt")


def public_names() -> Iterator[str]:
    """The library, the commands and flags, exit codes and causes."""
    yield from (f"lockstep.{name}" for name in lockstep.__all__)
    yield from (f"lockstep.join({name}=)" for name in inspect.signature(lockstep.join).parameters)
    yield from (f"Job.{name}" for name in vars(Job) if not name.startswith("_"))
    for name, method in inspect.getmembers(Job, inspect.isfunction):
        if not name.startswith("_"):
            yield from (f"Job.{name}({given}=)" for given in inspect.signature(method).parameters if given != "self")
    yield from (f"lockstep {command.name}" for command in COMMANDS)
    yield from (f"lockstep bench --{flag.name}" for flag in TABLE if flag.status is Status.WORKS)
    yield from (f"{name} = {code}" for name, code in vars(errors).items() if name.startswith("EXIT_"))
    yield from (f"cause: {cause.value}" for cause in Cause)


def test_every_name_that_was_public_still_is() -> None:
    known = LIST.read_text().splitlines()
    assert "lockstep.join(servers=)" in known
    assert sorted(set(known) - set(public_names())) == []


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}\n" for name in public_names()))
