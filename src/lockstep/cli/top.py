"""``lockstep top``: what the dashboard shows, in the terminal, on one screen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli.key_flags import KEY_FLAGS_HELP
from lockstep.cli.watching import WHAT_HELP, parse_watched
from lockstep.errors import HelpAsked

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.dashboard.board import LiveBoard

_HELP = """\
lockstep top: a job on one screen: the verdict, its tasks, who waits for whom, who is slow, links.

  lockstep top [WHAT]

{what}{key_flags}
It follows the job until Ctrl-C. Where there is no terminal, or the job has ended, it prints the screen once.
Exit codes: 0 ended by Ctrl-C or printed, 2 bad input.
"""

WAIT_SECONDS = 5.0


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP.format(what=WHAT_HELP, key_flags=KEY_FLAGS_HELP))
    source = parse_watched(argv, "lockstep top", ()).source("lockstep top")

    from rich.console import Console

    from lockstep.dashboard.board import LiveBoard

    board = LiveBoard(source)
    console = Console(file=sys.stdout)
    try:
        if console.is_terminal and source.lives:
            board.start()
            _follow(board, console)
        else:
            _print_once(board, console, looks=2 if source.lives else 1)
    except KeyboardInterrupt:
        pass
    finally:
        board.close()
    return 0


def _follow(board: LiveBoard, console: Console) -> None:
    from rich.live import Live

    from lockstep.cli.top_screen import screen

    number = 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not board.closed:
            newer = board.wait_newer(number, WAIT_SECONDS)
            if newer is not None:
                frame, number = newer
                live.update(screen(frame, console.width, console.height), refresh=True)


def _print_once(board: LiveBoard, console: Console, looks: int) -> None:
    """Two looks at a job that runs: one alone knows no rates."""
    from lockstep.cli.top_screen import screen
    from lockstep.dashboard.board import EVERY_SECONDS

    for number in range(looks):
        if number:
            threading.Event().wait(EVERY_SECONDS)
        board.look()
    newest = board.wait_newer(0, 0.0)
    assert newest is not None
    console.print(screen(newest[0], console.width, 0))
