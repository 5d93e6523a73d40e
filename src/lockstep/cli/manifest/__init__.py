"""``lockstep manifest ENGINE``: writes to standard output what an engine needs to start a job.

Each engine is a module with ``add_flags(parser)``, ``write(args) -> str`` and ``EXAMPLE``, one command line of it. The
words after two dashes are the program that every task runs, as ``args.program``.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Sequence
from typing import NoReturn

from lockstep.errors import BadInput, HelpAsked

ENGINES: dict[str, str] = {
    "kubernetes": "lockstep.cli.manifest.kubernetes",
    "slurm": "lockstep.cli.manifest.slurm",
}
"""By name, the module of each engine; imported only when it is asked for."""


class _Parser(argparse.ArgumentParser):
    """Bad input is told as in every other command."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; '{self.prog} --help' lists the flags.")


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    flags = list(itertools.takewhile(lambda word: word != "--", argv))
    program = tuple(argv[len(flags) + 1 :])
    names = " or ".join(ENGINES)
    if not flags or flags[0] in ("-h", "--help"):
        raise HelpAsked(help_text()) if flags else BadInput(f"name the engine: lockstep manifest {names}.")
    name, *rest = flags
    if name not in ENGINES:
        raise BadInput(f"there is no engine {name!r}; use {names}.")
    engine = importlib.import_module(ENGINES[name])
    parser = _Parser(
        prog=f"lockstep manifest {name}",
        usage=engine.EXAMPLE,
        description=engine.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    engine.add_flags(parser)
    if any(word in ("-h", "--help") for word in rest):
        raise HelpAsked(parser.format_help())
    args = parser.parse_args(rest)
    if not program:
        raise BadInput(f"the program is missing; write it after two dashes: {engine.EXAMPLE}")
    args.program = program
    print(engine.write(args), end="")
    return 0


def help_text() -> str:
    """Every engine with an example."""
    examples = "\n".join(f"  {importlib.import_module(module).EXAMPLE}" for module in ENGINES.values())
    return f"""\
lockstep manifest: write what a cluster's engine needs to start a job.

{examples}

  lockstep manifest ENGINE --help    the flags of an engine
"""
