"""``lockstep watch``: says why any PyTorch job hangs, without a change to it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence

from lockstep.cli.flags.flag import FlagKind, Group, Rows
from lockstep.cli.flags.parsing import read_command_line
from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime.startup.pages import Pages, page_problems
from lockstep.terminal import drop_what_cannot_be_written, say
from lockstep.watch.watched_command import WatchSpec, run_watched

_ROWS = Rows(Group.OUTPUT)
_TABLE = (
    _ROWS.works("folder", FlagKind.TEXT, "", "where reports, dumps and events go", upstream=False),
    _ROWS.works("abort", FlagKind.SWITCH, False, "end the job when a verdict says that it cannot go on", upstream=False),
    _ROWS.works(
        "on_verdict", FlagKind.TEXT, "", "a command that gets each verdict as JSON on its input", upstream=False
    ),
    _ROWS.works("verdict_webhook", FlagKind.TEXT, "", "an address that each verdict is posted to", upstream=False),
)

_HELP = """\
lockstep watch: why a PyTorch job hangs, whoever wrote it and however it is started.

  lockstep watch [FLAGS] -- torchrun --nproc-per-node=8 train.py ...
  lockstep watch [FLAGS] PID...   a job that already runs: its launcher, or its ranks

{flags}
{keys}
The program and its environment stay as they are; torch 2.5 or newer lets the watcher in.
While steps end in time nothing is done. When one is late, all ranks are looked at, and within
seconds a report on stderr says which rank of which collective is to blame, and why. A program
that computes or waits by itself gets a notice, and a verdict only after 600 s.
The job is left alone unless you give --abort. docs/watch.md has the details.

Exit codes: the command's own, 128+N if signal N killed it; 3 ended by --abort; 2 bad input.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    before = list(itertools.takewhile(lambda word: word != "--", argv))
    if any(word in ("-h", "--help") for word in before):
        raise HelpAsked(help_text())
    command = tuple(argv[len(before) + 1 :])
    spec = _spec(before, command, started="--" in argv)
    drop_what_cannot_be_written()
    return run_watched(spec, say)


def _spec(words: Sequence[str], command: tuple[str, ...], *, started: bool) -> WatchSpec:
    pids = [word for word in words if not word.startswith("-")]
    line = read_command_line([word for word in words if word.startswith("-")], _TABLE, "watch")
    mistakes = list(line.mistakes)
    pages = Pages(str(line.value("on_verdict")), str(line.value("verdict_webhook")))
    mistakes += page_problems(pages)
    if started and pids:
        mistakes.append(f"{pids[0]!r} stands before '--'; give either a command after '--' or process numbers.")
    if started and not command:
        mistakes.append("nothing stands after '--'; write the job there: lockstep watch -- torchrun train.py")
    if command and shutil.which(command[0]) is None:
        mistakes.append(f"there is no program {command[0]!r} here; write what to start after '--'.")
    if not started:
        mistakes.append("the job is missing; write it after two dashes: lockstep watch -- torchrun train.py")
    if mistakes:
        raise BadInput(mistakes)
    return WatchSpec(command=command, folder=str(line.value("folder")), abort=bool(line.value("abort")), pages=pages)


def help_text() -> str:
    """Every flag with its meaning."""
    from lockstep.cli.key_flags import KEY_FLAGS_HELP

    rows = [f"  {flag.usage():<26} {flag.help}" for flag in _TABLE]
    return _HELP.format(flags="\n".join(rows), keys=KEY_FLAGS_HELP)
