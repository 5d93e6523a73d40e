"""``lockstep dashboard``: a page on this machine's loopback that follows a job, or shows one that has ended."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli.key_flags import KEY_FLAGS_HELP
from lockstep.cli.watching import WHAT_HELP, parse_watched, whole_number
from lockstep.errors import BadInput, HelpAsked

if TYPE_CHECKING:
    from lockstep.dashboard.page_server import PageServer

_HELP = """\
lockstep dashboard: a page that follows a job: its tasks by host, who waits for whom, where steps
spend their time, throughput and loss, links, and the verdict with the command that helps.

  lockstep dashboard [WHAT] [FLAGS]

{what}
  --port=N                   serve at this port of 127.0.0.1 (default: a free one)
{key_flags}
Each printed link works once. Press Enter for another, Ctrl-C to end.
Exit codes: 0 ended by Ctrl-C, 2 bad input.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP.format(what=WHAT_HELP, key_flags=KEY_FLAGS_HELP))
    asked = parse_watched(argv, "lockstep dashboard", ("port",))
    port = whole_number("port", asked.rest["port"], 1, 65535) if "port" in asked.rest else 0
    source = asked.source("lockstep dashboard")

    from lockstep.dashboard.board import LiveBoard
    from lockstep.dashboard.page_server import PageServer

    board = LiveBoard(source)
    try:
        server = PageServer(board, port)
    except OSError as error:
        raise BadInput(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}; give another --port.") from error
    board.start()
    server.start()
    try:
        _serve(server)
    except KeyboardInterrupt:
        pass
    finally:
        board.close()
        server.close()
    return 0


def _serve(server: PageServer) -> None:
    """Print a link, and another one at every Enter, until the user or whoever started this ends it."""
    print(f"Open {server.new_link()}", flush=True)
    if os.environ.get("SSH_CONNECTION"):
        port = server.port
        print(f"from your own machine, after: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)
    print("Each link works once: press Enter for another one, Ctrl-C to end.", flush=True)
    while True:
        select.select([sys.stdin], [], [])
        if not sys.stdin.readline():  # nobody will ever press Enter
            threading.Event().wait()
        print(f"Open {server.new_link()}", flush=True)
