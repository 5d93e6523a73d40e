"""``lockstep run``: a monitor as the parent of any program; a launcher starts it instead of python."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli.flags.flag import FlagKind, Group, Rows
from lockstep.cli.flags.metrics_rows import METRICS_ROWS
from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime.startup.cluster import spare_problems
from lockstep.runtime.startup.metrics_options import MetricsOptions, metrics_problems
from lockstep.terminal import drop_what_cannot_be_written

if TYPE_CHECKING:
    from lockstep.runtime.monitor.spares import SparePlan

RESTARTS = 3

_TABLE = (
    Rows(Group.CLUSTER).works(
        "restarts",
        FlagKind.WHOLE,
        RESTARTS,
        f"how often the program is started again after it was lost (default: {RESTARTS})",
        upstream=False,
    ),
    Rows(Group.CLUSTER).works(
        "spares",
        FlagKind.WHOLE,
        0,
        "how many processes wait, with torch and lockstep loaded, to become the program after it was lost",
        upstream=False,
    ),
    *METRICS_ROWS,
)

_HELP = """\
lockstep run: start a program, answer for it, and start it again after a loss.

  lockstep run [--restarts=K] [--spares=N] -- python train.py ...
  torchrun --no-python --nproc-per-node=2 lockstep run -- python train.py ...
  srun --kill-on-bad-exit=0 lockstep run -- python train.py ...
  mpirun -np 2 lockstep run -- python train.py ...

{flags}
{keys}
A program is lost if a signal kills it that nobody sent to 'lockstep run': SIGKILL,
lack of memory, a crash in native code. An error of its own (an exception, exit
code 2) ends it for good. The program's task keeps its name and address, so its
job goes on where it can (docs/recovery.md). SIGINT, SIGTERM, SIGHUP, SIGUSR1 and
SIGUSR2 are passed on. Nothing that the program started outlives this command.

Exit codes: the program's own; 128+N if signal N killed it, or asked it to end
and it had to be killed; 2 bad input (nothing started).
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if "--" not in argv:
        if any(word in ("-h", "--help") for word in argv):
            raise HelpAsked(help_text())
        raise BadInput("the program is missing; write it after two dashes: lockstep run -- python train.py")
    flags = list(itertools.takewhile(lambda word: word != "--", argv))
    command = tuple(argv[len(flags) + 1 :])
    if any(word in ("-h", "--help") for word in flags):
        raise HelpAsked(help_text())
    line = _read(flags)
    restarts, metrics = _restarts(line), _metrics(line)
    if not command:
        raise BadInput("nothing stands after '--'; write the program there: lockstep run -- python train.py")
    if shutil.which(command[0]) is None:
        raise BadInput(f"there is no program {command[0]!r} here; write what to start after '--'.")
    spares = _spares(line, restarts, command)
    drop_what_cannot_be_written()
    from lockstep.runtime.monitor.runner import RunSpec, run_program

    return run_program(RunSpec(command=command, restarts=restarts, metrics=metrics, spares=spares))


def _read(flags: Sequence[str]) -> CommandLine:
    line = read_command_line(flags, _TABLE, "run")
    if line.mistakes:
        raise BadInput(line.mistakes)
    return line


def _metrics(line: CommandLine) -> MetricsOptions:
    asked = MetricsOptions(str(line.value("metrics_port") or ""), str(line.value("metrics_file") or ""))
    if problems := list(metrics_problems(asked)):
        raise BadInput(problems)
    return asked


def _restarts(line: CommandLine) -> int:
    found = line.value("restarts")
    assert isinstance(found, int)
    if found < 0:
        raise BadInput(f"--restarts={found} is negative; give 0 or more.")
    return found


def _spares(line: CommandLine, restarts: int, command: tuple[str, ...]) -> SparePlan | None:
    count = line.value("spares")
    assert isinstance(count, int)
    if problems := list(spare_problems(count, restarts)):
        raise BadInput(problems)
    if not count:
        return None
    from lockstep.cli.preloading import FOR_PROGRAM
    from lockstep.runtime.monitor.python_command import is_this_python, python_command
    from lockstep.runtime.monitor.spares import SparePlan

    found = python_command(command)
    if found is None or not is_this_python(found.python) or (found.file and not os.path.isfile(found.file)):
        raise BadInput(
            f"--spares={count} needs a Python program of this interpreter ({sys.executable}), written as 'python "
            "file.py ...' or 'python -m module ...' after '--'; write it so, or leave out --spares."
        )
    return SparePlan(count=count, program=found, loads=FOR_PROGRAM, any_program=True)


def help_text() -> str:
    """Every flag with its meaning."""
    from lockstep.cli.key_flags import KEY_FLAGS_HELP

    rows = [
        textwrap.fill(f"  {flag.usage():<26} {flag.help}", 84, subsequent_indent=" " * 29, break_on_hyphens=False)
        for flag in _TABLE
    ]
    return _HELP.format(flags="\n".join(rows), keys=KEY_FLAGS_HELP)
