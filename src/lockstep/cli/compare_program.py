"""``lockstep compare --program=train.py``: your own program in each shape, in turn, with the parts of its steps."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.benchmark.compare.program_results import NAMES, ProgramRun, ShapeRow, program_json, program_table
from lockstep.benchmark.compare.program_runs import ProgramComparison, ProgramRunner
from lockstep.cli.compare_flags import DEFAULT_SERVERS, DEFAULT_WORKERS, MAX_REPEATS, file_problems, unknown_names
from lockstep.cli.compare_turns import TurnBar, about_machine, in_turns
from lockstep.cli.flags.flag import FlagKind, Group, Rows
from lockstep.cli.flags.help import flag_rows
from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.errors import EXIT_FAILED, BadInput, HelpAsked
from lockstep.runtime.compared import Shape

_ROWS = Rows(Group.OUTPUT)
_SHAPES = tuple(shape.value for shape in Shape)
MAX_STEPS = 1_000_000

PROGRAM_FLAGS = (
    _ROWS.works(
        "program", FlagKind.TEXT, None, "the program: a Python file that calls lockstep.join()", upstream=False
    ),
    _ROWS.works("only", FlagKind.LIST, (), f"measure only these: {', '.join(_SHAPES)}", upstream=False),
    _ROWS.works("workers", FlagKind.WHOLE, DEFAULT_WORKERS, "processes that train", upstream=False),
    _ROWS.works("ps", FlagKind.WHOLE, DEFAULT_SERVERS, "servers beside them, in the shape 'servers'", upstream=False),
    _ROWS.works("num_threads", FlagKind.WHOLE, 0, "threads of a trainer; 0: its share of the cores", upstream=False),
    _ROWS.works("num_batches", FlagKind.WHOLE, 30, "timed steps", upstream=False),
    _ROWS.works("num_warmup_batches", FlagKind.WHOLE, 8, "steps before them, at least 1", upstream=False),
    _ROWS.works("repeats", FlagKind.WHOLE, 3, "rounds; each measures every shape once, in turn", upstream=False),
    _ROWS.works("run_timeout", FlagKind.NUMBER, 600.0, "how long one run may take, in seconds", upstream=False),
    _ROWS.works("json", FlagKind.TEXT, None, "file for all numbers (JSON)", upstream=False),
)

_HELP = """\
lockstep compare --program: run your own program in several shapes, in turn, and print how long a step takes in each.

  lockstep compare --program=train.py --workers=2 -- --batch_size=8

What follows '--' is passed to the program. It calls lockstep.join() and job.wrap() as always, and is ended after its
timed steps. docs/compare.md says how the shapes without Lockstep come about.

{flags}
"""


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """The comparison that a command line asks for, and where its numbers go."""

    comparison: ProgramComparison
    json_path: Path | None
    asked_shapes: bool
    """The shapes were named explicitly, so one in which the program cannot run is a failure."""


def names_program(argv: Sequence[str]) -> bool:
    """Whether this command line is about a program of the user's."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return any(word == "--program" or word.startswith("--program=") for word in own)


def run_program(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    request = parse_program(argv)
    rows = _measure_all(request.comparison)
    for line in _report(request.comparison, rows):
        print(line)
    if request.json_path is not None:
        request.json_path.write_text(json.dumps(program_json(rows, _about(request.comparison)), indent=1) + "\n")
        print(f"wrote {request.json_path}")
    lacking = [row for row in rows if not row.milliseconds]
    refused = lacking if request.asked_shapes else len(lacking) == len(rows)
    return EXIT_FAILED if refused or any(row.failed for row in rows) else 0


def parse_program(argv: Sequence[str]) -> ProgramRequest:
    """BadInput lists everything that is wrong; HelpAsked carries the help."""
    own, arguments = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ())
    line = read_command_line(own, PROGRAM_FLAGS, "compare --program")
    if line.help_on is not None:
        raise HelpAsked(_HELP.format(flags="\n".join(flag_rows(PROGRAM_FLAGS))))
    if line.mistakes:
        raise BadInput(line.mistakes)
    if sentences := _problems(line):
        raise BadInput(sentences)
    only, json_path = line.value("only"), line.value("json")
    assert isinstance(only, tuple)
    workers = _whole(line, "workers")
    comparison = ProgramComparison(
        program=Path(str(line.value("program"))).resolve(),
        arguments=tuple(arguments),
        shapes=tuple(shape for shape in Shape if not only or shape.value in only),
        servers=_whole(line, "ps"),
        workers=workers,
        threads=_whole(line, "num_threads") or max(1, len(os.sched_getaffinity(0)) // workers),
        warm_up=_whole(line, "num_warmup_batches"),
        steps=_whole(line, "num_batches"),
        repeats=_whole(line, "repeats"),
        run_timeout=_seconds(line),
    )
    return ProgramRequest(comparison, None if json_path is None else Path(str(json_path)), bool(only))


def _whole(line: CommandLine, name: str) -> int:
    value = line.value(name)
    assert isinstance(value, int)
    return value


def _seconds(line: CommandLine) -> float:
    value = line.value("run_timeout")
    assert isinstance(value, float)
    return value


def _problems(line: CommandLine) -> list[str]:
    sentences = []
    path = Path(str(line.value("program")))
    if not path.is_file():
        sentences.append(f"--program={path} is not a file; give the path of a Python program.")
    bounds = {
        "workers": (1, 256),
        "ps": (1, 256),
        "num_threads": (0, 4096),
        "num_batches": (1, MAX_STEPS),
        "num_warmup_batches": (1, MAX_STEPS),
        "repeats": (1, MAX_REPEATS),
    }
    for name, (least, most) in bounds.items():
        if not least <= (value := _whole(line, name)) <= most:
            sentences.append(f"--{name}={value} is out of range; give {least} to {most}.")
    if _seconds(line) <= 0:
        sentences.append(f"--run_timeout={_seconds(line):g} must be a number of seconds above 0.")
    sentences += unknown_names(line, "only", _SHAPES)
    if (json_path := line.value("json")) is not None:
        sentences += file_problems("json", str(json_path))
    return sentences


def _measure_all(comparison: ProgramComparison) -> list[ShapeRow]:
    runner = ProgramRunner(comparison, os.environ)
    rows = [ShapeRow(shape) for shape in comparison.shapes]
    with TurnBar(len(rows) * comparison.repeats) as bar:
        for number, row in in_turns(rows, comparison.repeats):
            bar.begins(f"round {number} of {comparison.repeats}: {NAMES[row.shape]}")
            # What the program refused once, it refuses in every round.
            cannot = next((run.cannot for run in row.runs if run.cannot), "")
            row.runs.append(ProgramRun(cannot=cannot) if cannot else runner.measure(row.shape))
            bar.ended(_words(row.runs[-1]))
    return rows


def _words(run: ProgramRun) -> str:
    if run.parts is not None:
        return f"{1000 * run.parts.step:.2f} ms a step"
    return f"failed: {run.failure}" if run.failure else f"cannot run so: {run.cannot}"


def _report(comparison: ProgramComparison, rows: Sequence[ShapeRow]) -> list[str]:
    lines = [_title(comparison), "", *program_table(rows)]
    for row in rows:
        if row.trouble:
            lines += ["", f"{NAMES[row.shape]}: {row.trouble}"]
    return [*lines, ""]


def _title(comparison: ProgramComparison) -> str:
    command = " ".join([comparison.program.name, *comparison.arguments])
    return (
        f"{command}: {comparison.workers} trainer(s) with {comparison.threads} thread(s) each, {comparison.servers} "
        f"server(s) where there are any, {comparison.steps} steps after {comparison.warm_up}, "
        f"{len(os.sched_getaffinity(0))} cores, {comparison.repeats} round(s)"
    )


def _about(comparison: ProgramComparison) -> dict[str, Any]:
    return {
        "program": str(comparison.program),
        "arguments": list(comparison.arguments),
        "servers": comparison.servers,
        "workers": comparison.workers,
        "threads": comparison.threads,
        "steps": comparison.steps,
        "warm_up": comparison.warm_up,
        **about_machine(),
    }
