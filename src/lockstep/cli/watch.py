"""``lockstep watch``: says why any PyTorch job hangs, without a change to it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.flags.flag import FlagKind, Group, Rows
from lockstep.cli.flags.parsing import read_command_line
from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime.startup.metrics_options import MetricsOptions, metrics_problems
from lockstep.runtime.startup.pages import Pages, page_problems
from lockstep.terminal import drop_what_cannot_be_written, say
from lockstep.watch.spec import WatchSpec

_ROWS = Rows(Group.OUTPUT)
_TABLE = (
    _ROWS.works("folder", FlagKind.TEXT, "", "where reports, dumps and events go", upstream=False),
    _ROWS.works(
        "abort", FlagKind.SWITCH, False, "end the job when a verdict says that it cannot go on", upstream=False
    ),
    _ROWS.works(
        "on_verdict", FlagKind.TEXT, "", "a command that gets each verdict as JSON on its input", upstream=False
    ),
    _ROWS.works(
        "port", FlagKind.WHOLE, 0, "where watchers of several hosts meet (default: MASTER_PORT + 1)", upstream=False
    ),
    _ROWS.works(
        "metrics_port", FlagKind.TEXT, "", "PORT, or HOST:PORT, where metrics are shown for Prometheus", upstream=False
    ),
    _ROWS.works("metrics_file", FlagKind.TEXT, "", "a file for them, written every 10 seconds", upstream=False),
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
On several hosts, start one watcher on each, above each torchrun: the one beside rank 0 speaks
for all. They need the same key, as all of Lockstep does.
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
    if spec.pids:
        from lockstep.watch.attached import run_attached

        return run_attached(spec, say)
    from lockstep.watch.watched_command import run_watched

    return run_watched(spec, say)


def _spec(words: Sequence[str], command: tuple[str, ...], *, started: bool) -> WatchSpec:
    pids = [word for word in words if not word.startswith("-")]
    line = read_command_line([word for word in words if word.startswith("-")], _TABLE, "watch")
    mistakes = list(line.mistakes)
    pages = Pages(str(line.value("on_verdict")), str(line.value("verdict_webhook")))
    mistakes += page_problems(pages)
    metrics = MetricsOptions(str(line.value("metrics_port")), str(line.value("metrics_file")))
    mistakes += metrics_problems(metrics)
    if started and pids:
        mistakes.append(f"{pids[0]!r} stands before '--'; give either a command after '--' or process numbers.")
    if started and not command:
        mistakes.append("nothing stands after '--'; write the job there: lockstep watch -- torchrun train.py")
    if command and shutil.which(command[0]) is None:
        mistakes.append(f"there is no program {command[0]!r} here; write what to start after '--'.")
    wrong = [word for word in pids if not (word.isdecimal() and Path(f"/proc/{word}").exists())]
    if wrong and not started:
        mistakes.append(f"{wrong[0]!r} is not the number of a process here; a command belongs after two dashes.")
    if not started and not pids:
        mistakes.append("the job is missing; write it after two dashes: lockstep watch -- torchrun train.py")
    port = line.value("port")
    assert isinstance(port, int)
    if not 0 <= port < 1 << 16:
        mistakes.append(f"--port={port} is no port; give a number from 1 to 65535.")
    abort = bool(line.value("abort"))
    if abort and pids:
        mistakes.append(
            "--abort is for a job that 'lockstep watch' has started; leave it out, or end the job yourself."
        )
    if mistakes:
        raise BadInput(mistakes)
    return WatchSpec(
        command=command,
        pids=tuple(int(word) for word in pids),
        folder=str(line.value("folder")),
        abort=abort,
        pages=pages,
        metrics=metrics,
        port=port,
    )


def help_text() -> str:
    """Every flag with its meaning."""
    from lockstep.cli.key_flags import KEY_FLAGS_HELP

    rows = [f"  {flag.usage():<26} {flag.help}" for flag in _TABLE]
    return _HELP.format(flags="\n".join(rows), keys=KEY_FLAGS_HELP)
