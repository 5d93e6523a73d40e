"""The ``lockstep`` command: finds the requested command, and imports nothing else."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import EXIT_BAD_INPUT, BadInput, HelpAsked
from lockstep.version import __version__

EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
"""As of a program that SIGPIPE ended."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: ``module`` has ``run(argv) -> int``, and is imported only when the command is used."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("bench", "lockstep.cli.bench", "train a model on synthetic or real images and print images/sec"),
    Command("data", "lockstep.cli.data", "make a small data set of real images, or check one"),
    Command("trace", "lockstep.cli.trace", "merge the traces of all tasks of a run on one clock"),
    Command("checkpoint", "lockstep.cli.checkpoint", "show, verify and export the checkpoints of a run"),
    Command("compare", "lockstep.cli.compare", "measure Lockstep next to DDP, one process, and the limit"),
    Command("doctor", "lockstep.cli.doctor", "find out why a cluster does not start, before or during the start"),
    Command("run", "lockstep.cli.run", "start any program, answer for it, and start it again after a loss"),
    Command("ps", "lockstep.cli.ps", "serve any job that uses the library, without its script"),
    Command("watch", "lockstep.cli.watch", "watch any PyTorch job, and say why it hangs"),
    Command("why", "lockstep.cli.why", "why a job hangs: ask a live cluster, or read a run folder"),
    Command("net", "lockstep.cli.net", "measure every transport here, or between two hosts"),
    Command("sim", "lockstep.cli.sim", "simulate a cluster: plant faults, or find the number of servers"),
    Command("drill", "lockstep.cli.drill", "plant a fault in a small cluster and see what it reports"),
)

_HELP = """\
Lockstep {version}: synchronous PyTorch training on many machines.
Every step completes on every task, or within seconds you learn which tensor of
which step is missing, between which two tasks, and why.

  lockstep COMMAND [FLAGS]

{commands}
  lockstep COMMAND --help    the flags of a command
  lockstep --version         which version this is
First run, one server and two workers here: lockstep bench --ps=1 --workers=2
Exit codes: 0 done, 1 failed, 2 bad input (nothing started),
            3 ended by a verdict or a stall, 128+N by signal N (130: Ctrl-C)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # Before it exits, Python searches all objects for cycles. With torch's objects this takes half a second.
        atexit.register(gc.freeze)
    if argv is None and signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        # It asks a task for its files, and would kill a process that is not yet ready to handle it. If it is blocked,
        # a signal that has already arrived must not get lost.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        return _run(words)
    except BrokenPipeError:
        if not _readers_gone():
            raise  # a connection, which is an error like any other
        return EXIT_NO_READER


def _run(words: list[str]) -> int:
    try:
        code = _dispatch(words)
        if sys.stdout is not None:  # started with a closed descriptor
            sys.stdout.flush()
    except HelpAsked as asked:
        print(asked.text, end="", flush=True)
        return 0
    except BadInput as bad:
        print("".join(f"lockstep: {sentence}\n" for sentence in bad.sentences), end="", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _dispatch(words: list[str]) -> int:
    if not words:
        raise BadInput(
            f"a command is missing; write, for example, 'lockstep {COMMANDS[0].name}', or 'lockstep --help'."
        )
    name, *rest = words
    if name in ("-h", "--help", "help"):
        raise HelpAsked(overview())
    if name in ("-V", "--version", "version"):
        raise HelpAsked(f"Lockstep {__version__}\n")
    for command in COMMANDS:
        if command.name == name:
            from lockstep.cli.key_flags import take_key_flags

            return int(importlib.import_module(command.module).run(take_key_flags(rest)))
    raise BadInput(_unknown(name))


def overview() -> str:
    """The whole product in one screen."""
    rows = [f"  {command.name:<10} {command.summary}" for command in COMMANDS]
    return _HELP.format(version=__version__, commands="\n".join(rows))


def _unknown(name: str) -> str:
    from lockstep.cli.flags.values import did_you_mean, nearest

    if name.startswith("-"):
        return f"{name!r} stands where the command belongs; write 'lockstep bench {name} ...'."
    known = [command.name for command in COMMANDS]
    alike = nearest(name, known)
    remedy = did_you_mean(alike) if alike else f"'lockstep --help' lists the commands: {', '.join(known)}."
    return f"there is no command {name!r}; {remedy}"


def _readers_gone() -> bool:
    """Whether a pipe that this command writes to has lost its reader (head, less). Nothing is written to it again:
    Python would complain when it flushes the stream at exit."""
    gone = False
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            gone = True
    return gone


if __name__ == "__main__":
    sys.exit(main())
